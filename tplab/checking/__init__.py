"""What `check_parallel` and `same_model` compare, find and report, in the same words for both frameworks."""
