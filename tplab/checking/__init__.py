"""What `check_parallel` found, and what it says is wrong; the same words for both frameworks."""
