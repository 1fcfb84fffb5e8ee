"""What is counted, shown and refused before training starts."""
