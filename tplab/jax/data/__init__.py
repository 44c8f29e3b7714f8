"""The data dimension in JAX: ranks that hold the same parameters and learn from different data.

What must be the same on every replica, and what must not:

    parameters    the same, and JAX's types know it: in_specs=P()
    gradients     JAX adds them up for such parameters; `data_parallel` averages them bucket by bucket
    the loss      divided by the result of `tokens_per_rank`, the same number on every rank
    batch norm    by the statistics of all replicas: `batch_norm`
    clipping      by one factor: `clip_gradients`
    data          different on each: in_specs=P("dp"), or by axis_index("dp")
    dropout       different masks on each: dropout(x, p, key=key, axis="dp"), with one key for all
    rank_key()    a different key on every rank, also within one replica, from the seed of the run
"""
