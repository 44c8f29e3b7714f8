"""Simulated ranks: one thread each, running one at a time; what they keep, send and note."""
