"""Models of these layers, somebody else's models sharded, and the unsharded models that they are compared with."""
