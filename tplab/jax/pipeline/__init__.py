"""Pipelines: a schedule of `tplab.schedules`, executed on real arrays by one compiled program.

`train_batch` is the function to call. `stages` cuts a model's layers, and `flat` packs arrays whose shapes differ
between ranks. `equations` and `passes` cut the gradient of a stage into F, B, I and W, and in `programs` equal stages
share one program. `plan` decides in advance what each rank does, sends and keeps, and where; `ticks` is the loop that
follows the plan. `copies` adds up the gradients of replicated parameters.
"""
