"""Pipeline schedules as they are drawn: their figures, their bars, and an executed one over its prediction."""
