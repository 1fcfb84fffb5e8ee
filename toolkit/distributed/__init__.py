"""Several processes: engines, ranks, launcher, heartbeat."""
