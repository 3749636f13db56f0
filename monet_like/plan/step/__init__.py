"""Menus of the pieces of a step, the choice among them, and how far it can be from the best."""
