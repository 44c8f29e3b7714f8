"""The picture of `experts`: a layer of experts, read from a trace."""
