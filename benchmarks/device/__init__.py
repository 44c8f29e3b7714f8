"""Checks that need a GPU: `python -m benchmarks.device` runs them within eight minutes and writes one small file."""
