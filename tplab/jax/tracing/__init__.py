"""From what JAX traced and XLA compiled to a trace."""
