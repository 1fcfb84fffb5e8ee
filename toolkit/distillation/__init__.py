"""What distillation needs next to a loss: the teacher, in memory or its stored log-probabilities, and its vocabulary."""
