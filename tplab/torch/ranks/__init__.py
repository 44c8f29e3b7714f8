"""Simulated ranks: one thread each, of which one runs at a time; what they keep, send and note."""
