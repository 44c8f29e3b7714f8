"""Pipelines: a schedule of `tplab.schedules`, executed on real arrays by one compiled program.

`train_batch` has the call. `stages` cuts a model's layers, `stage` runs one stage's layers; `flat` packs what differs in
shape from rank to rank; `equations` and `passes` cut a stage's gradient into F, B, I and W; `plan` settles ahead what
lies where and who sends when; `copies` adds up the gradients of what several ranks hold.
"""
