"""`check_parallel`: a parallel model compared with the unsharded one."""
