"""Plain data that stages hand on: programs, schedules, costs and their files. Neither torch nor a solver."""
