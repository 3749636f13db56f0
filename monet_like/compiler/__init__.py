"""The stages in a row: from a model and a budget to a schedule file."""
