"""A step of the user's own, run once with stand-ins for the pieces that are planned: what is alive at every moment."""
