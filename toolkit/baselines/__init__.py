"""Baselines: what a model of each task must beat, computed from the same rows without one."""
