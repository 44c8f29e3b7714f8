"""Searches for schedules: greedy, automatic, or with a proof that the result is optimal."""
