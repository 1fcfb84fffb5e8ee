"""A recipe's command line, and the `toolkit` command."""
