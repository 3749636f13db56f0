"""Solves 0/1 programs with HiGHS, CBC and other solvers; knows nothing of training."""
