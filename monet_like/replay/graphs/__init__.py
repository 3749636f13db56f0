"""Training steps that are replayed as CUDA graphs."""
