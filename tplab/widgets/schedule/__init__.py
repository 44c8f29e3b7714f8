"""Drawing pipeline schedules: their figures, their bars, and an executed schedule over its prediction."""
