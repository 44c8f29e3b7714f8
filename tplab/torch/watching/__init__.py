"""Listeners on a rank's program: the bytes of its tensors, their kinds, and their types along each axis."""
