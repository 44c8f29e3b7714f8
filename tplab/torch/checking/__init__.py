"""`check_parallel`: a parallel model compared with the unsharded one; `same_model`: a script on many ranks and on one.

`check_parallel` has the main function. `side` runs a model on its mesh, `culprit` and `recut` look for where and why it
went wrong, `masks` checks dropout. The comparison itself and its messages are in `tplab.checking`.
"""
