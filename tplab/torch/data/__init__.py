"""The data dimension in torch: ranks that hold the same parameters and learn from different data.

What must be the same on every replica, and what must not:

    parameters    the same: `data_parallel` begins with those of position 0, or all ranks draw alike (tplab's layers do)
    gradients     each rank's own until `average_gradients`, or the hooks of `data_parallel`, make them their mean
    the loss      divided by the result of `tokens_per_rank`, the same number on every rank
    batch norm    by the statistics of all replicas: `batch_norm`
    clipping      by one factor: `clip_gradients`
    data          different on each: in_specs=P("dp"), or by axis_index("dp")
    dropout       different masks on each: dropout(x, p, axis="dp"), from the seed of the run
    torch.rand    different on every rank, also within one replica, from the seed of the run
"""
