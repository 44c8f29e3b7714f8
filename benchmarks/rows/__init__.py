"""One file a row (or a few that share a run); each has `measure() -> list[Row]` and runs in a process of its own."""
