"""The data dimension in JAX: ranks that hold the same parameters, and learn from other data.

What must be the same on every replica, and what must not:

    parameters    the same, and JAX's types know it: in_specs=P()
    gradients     JAX adds them up where it meets such parameters; `data_parallel` averages them bucket by bucket
    the loss      divided by what `tokens_per_rank` says, the same number on every rank
    batch norm    by the statistics of all of them: `batch_norm`
    clipping      by one factor: `clip_gradients`
    data          other data on each: in_specs=P("dp"), or by axis_index("dp")
    dropout       other masks on each: dropout(x, p, key=key, axis="dp"), with one key for all
    rank_key()    another key on every rank, those of one replica too, from the seed of the run
"""
