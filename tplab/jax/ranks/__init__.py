"""How a rank's program runs: devices, the compiled program, and what it was compiled from."""
