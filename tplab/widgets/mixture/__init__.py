"""What `experts` draws: a layer of experts, read from a trace."""
