"""Pipelines: a schedule of `tplab.schedules`, executed on real tensors.

`train_batch` is the function to call. `stages` cuts a model's layers, `stage` runs one stage's actions on a `graph`,
whose backward pass `split_backward` can split in two; `copies` adds up gradients of copied parameters.
"""
