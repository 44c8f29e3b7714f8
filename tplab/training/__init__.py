"""Training a GPT over a mesh: what the loops of both frameworks share."""
