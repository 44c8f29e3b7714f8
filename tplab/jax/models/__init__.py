"""Models made of these layers, and the unsharded models that they are compared with."""
