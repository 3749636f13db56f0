"""The integer program: its equations, relaxations that give bounds, and the search around them."""
