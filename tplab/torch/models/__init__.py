"""Models of these layers, other people's models sharded, and the unsharded models that they are compared with."""
