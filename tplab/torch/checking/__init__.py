"""`check_parallel`: somebody's parallel model compared with the unsharded one, tensor by tensor.

`check_parallel` leads through it. `side` runs a model on its mesh, `culprit` and `recut` look for where and why it went
wrong, `masks` watches dropout. The comparison itself and its words are those of `tplab.checking`.
"""
