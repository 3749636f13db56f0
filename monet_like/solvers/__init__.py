"""Solves 0/1 programs; knows nothing of training."""
