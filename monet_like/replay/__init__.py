"""From a schedule file to a training step."""
