"""Layers whose weights are spread over an axis of the mesh."""
