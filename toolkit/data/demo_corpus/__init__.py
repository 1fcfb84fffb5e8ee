"""The embedded corpus: Python's own standard library, its tasks, and what a model of it must beat."""
