"""Batches: many tasks run with many agents, many times, within one budget, and resumed after any crash."""
