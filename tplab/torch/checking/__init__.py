"""`check_parallel`: somebody's parallel model held against the unsharded one, tensor by tensor.

`comparison` has it. `answer` runs a model, `witness` gathers what ranks hold, `evidence` compares it, `culprit` and
`recut` look for where and why it went wrong, `masks` watches dropout. The words are those of `tplab.checking.verdict`.
"""
