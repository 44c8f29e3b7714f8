"""The rules that make schedules, one family per file."""
