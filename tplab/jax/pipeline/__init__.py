"""Pipelines: a schedule of `tplab.schedules`, executed on real arrays by one compiled program.

`train_batch` has the call. `stages` cuts a model's layers, and `flat` packs what differs in shape from rank to rank.
`stage` runs layers; `equations` and `passes` cut its gradient into F, B, I and W, and in `programs` equal stages share
one. `plan` settles ahead who does, sends and keeps what, and where; `ticks` is the loop that follows it, and `act` an
action in it. `copies` adds up the gradients of what several ranks hold.
"""
