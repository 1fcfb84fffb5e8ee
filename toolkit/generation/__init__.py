"""Text from a model: samples while it trains, answers of a trained one."""
