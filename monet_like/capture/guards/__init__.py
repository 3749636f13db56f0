"""Guards: the Python values that a model's step reads or sets, and whether they changed since the capture."""
