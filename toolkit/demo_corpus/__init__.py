"""The embedded corpus (Python's own standard library), its tasks, and baselines that a model must beat."""
