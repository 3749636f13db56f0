"""The integer program: equations, bounds and the search around it."""
