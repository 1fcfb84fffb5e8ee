"""Data that need no download: the embedded corpus (the standard library of Python), its tasks, and made problems."""
