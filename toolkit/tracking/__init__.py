"""The console, throughput, and trackers."""
