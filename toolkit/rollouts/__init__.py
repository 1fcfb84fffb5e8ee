"""Rollouts: from prompts to scored completions, and what their rewards are worth."""
