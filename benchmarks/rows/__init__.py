"""One file per row, or per few rows that share a run. Each has `measure() -> list[Row]` and runs in its own process."""
