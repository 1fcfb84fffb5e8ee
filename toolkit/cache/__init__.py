"""Folders that are built once, under keys that name their content, and verified at each start."""
