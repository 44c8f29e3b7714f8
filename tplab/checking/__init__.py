"""What `check_parallel` finds, and how it says what is wrong; the words are the same for both frameworks."""
