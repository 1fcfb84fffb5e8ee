"""A run's directory: its files, its card, its summary, and two runs compared."""
