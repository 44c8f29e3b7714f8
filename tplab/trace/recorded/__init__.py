"""Real runs: the files that the ranks' processes have written, merged into one measured trace."""
