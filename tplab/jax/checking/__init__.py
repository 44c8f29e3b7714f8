"""`check_parallel`: somebody's parallel model beside the unsharded one."""
