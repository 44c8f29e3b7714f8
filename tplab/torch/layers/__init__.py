"""Layers whose weights are sharded over an axis of the mesh."""
