"""Sharded tensors as they are drawn: cut into pieces, on their ranks, and multiplied."""
