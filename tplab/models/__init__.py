"""What the models of both frameworks share: their configurations, how their parameters lie, and their states."""
