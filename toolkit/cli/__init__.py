"""The `toolkit` command: one file a subcommand."""
