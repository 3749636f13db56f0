"""Plain data that the stages hand on: programs, schedules, costs and their files. Needs neither torch nor a solver."""
