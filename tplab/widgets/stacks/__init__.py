"""The picture of `memory_timeline`: stacked areas, laid out once for browser and still picture."""
