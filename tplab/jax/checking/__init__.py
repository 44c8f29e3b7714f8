"""`check_parallel`: a parallel model and the unsharded one; `same_model`: a step on a mesh and on one device."""
