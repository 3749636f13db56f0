"""`auto_schedule`: from a model and a budget to the wrapped model, planned at its first step."""
