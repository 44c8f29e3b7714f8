"""The tools that fit the constants of forecasts to published measurements, and print how far off the forecasts are.

    python -m benchmarks.fit.chips      collectives in a node, and kernels of chips
    python -m benchmarks.fit.fabrics    networks between nodes
    python -m benchmarks.fit.steps      training steps

Each prints its constants and errors; with --write it also writes the constants into the package.
"""
