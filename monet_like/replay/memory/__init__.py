"""Where the tensors of a step lie."""
