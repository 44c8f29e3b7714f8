"""The data dimension in torch: ranks that hold the same parameters, and learn from other data.

What must be the same on every replica, and what must not:

    parameters    the same: `data_parallel` begins with those of position 0, or all ranks draw alike (tplab's layers do)
    gradients     each rank's own until `average_gradients`, or the hooks of `data_parallel`, make them their mean
    the loss      divided by what `tokens_per_rank` says, the same number on every rank
    batch norm    by the statistics of all of them: `batch_norm`
    clipping      by one factor: `clip_gradients`
    data          other data on each: in_specs=P("dp"), or by axis_index("dp")
    dropout       other masks on each: dropout(x, p, axis="dp"), from the seed of the run
    torch.rand    other numbers on every rank, those of one replica too, from the seed of the run
"""
