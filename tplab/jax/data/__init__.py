"""The data dimension in JAX: ranks that hold the same parameters, and learn from other data."""
