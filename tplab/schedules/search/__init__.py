"""Schedules that are searched for: greedily, automatically, or proven best."""
