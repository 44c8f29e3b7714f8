"""The data dimension in torch: ranks that hold the same parameters, and learn from other data."""
