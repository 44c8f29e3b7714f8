"""The table of figures: `make bench`, or `python -m benchmarks NAME...` for single rows."""
