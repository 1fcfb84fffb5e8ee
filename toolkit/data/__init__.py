"""From sources to micro-batches."""
