"""Training steps that are captured in a CUDA graph and replayed (docs/graphs.md)."""
