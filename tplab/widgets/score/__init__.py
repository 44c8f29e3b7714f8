"""The score of a trace: everything to draw and when, and the picture at one moment."""
