"""Pipelines: a schedule of `tplab.schedules`, executed on real tensors.

`train_batch` is the function to call. `stages` cuts a model's layers, `stage` runs one stage's actions, on a `graph`
whose backward pass `split_backward` can split in two; `saved` counts what is kept; `copies` adds up the gradients of
what several ranks hold.
"""
