"""Benchmarks: a correctness gate first, a baseline in the same run, one row of a CSV file for each case."""
