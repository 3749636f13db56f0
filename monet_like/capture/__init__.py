"""Capture: traces one training step of a model and lowers it to a `Program`."""
