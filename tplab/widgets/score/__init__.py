"""The score of a trace: what there is to draw and when, and the picture at one moment of it."""
