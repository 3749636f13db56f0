"""What no schedule can beat: one Lagrangian relaxation, of a program, of its parts, and of the pieces of a step."""
