"""Plans within ``torch.compile``: Inductor's joint graph as a program, and its forward and backward from a schedule."""
