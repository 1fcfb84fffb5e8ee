"""Prompts to scored completions: sampling, rewards, advantages, and the batches that a policy is trained on."""
