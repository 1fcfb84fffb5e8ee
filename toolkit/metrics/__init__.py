"""Metrics: what an evaluation adds up over micro-batches, and how a figure comes out of the sums."""
