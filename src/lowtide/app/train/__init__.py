"""Training from the command line: configuration, loop, checkpoints, metrics."""
