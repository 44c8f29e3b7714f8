"""What only a GPU can show: `python -m benchmarks.device` runs it within eight minutes and writes one small file."""
