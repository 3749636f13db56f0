"""The compiler as objects: a job (a model with inputs on a device) and its solved plans.

Scripts, notebooks and commands use them.
"""
