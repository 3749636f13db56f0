"""What a model's step reads and sets besides tensors, and whether it changed since the capture."""
