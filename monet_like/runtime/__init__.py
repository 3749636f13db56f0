"""Runs a program's calls: resolves operators, generates Python, copies values to the host."""
