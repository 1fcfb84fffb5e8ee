"""What preference losses need next to a loss: the reference, its stored values, the KL estimate, layouts of pairs."""
