"""What several commands share: how things are written on the command line, workloads, variants, rows of results."""
