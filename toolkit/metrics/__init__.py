"""Metrics: what an evaluation adds up over micro-batches, and how a metric is computed from the sums."""
