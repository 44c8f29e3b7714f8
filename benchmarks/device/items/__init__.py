"""One file for each thing that is tried. `tasks(place)` yields its checks."""
