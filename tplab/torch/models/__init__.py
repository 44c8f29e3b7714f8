"""Models built of tplab's layers, `transformers` models sharded by a plan, and unsharded models to compare with."""
