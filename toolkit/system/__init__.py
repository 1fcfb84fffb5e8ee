"""What is not about training: the screen, time limits, files and the machine."""
