"""Costs of tasks, seconds and workspace bytes, measured or estimated."""
