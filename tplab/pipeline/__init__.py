"""What a pipeline needs before it runs: layers that are not made yet, where to cut them, and microbatches."""
