"""What leaves a run: the model directory, its card and licenses, merged adapters."""
