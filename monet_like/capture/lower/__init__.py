"""From the joint graph to values and tasks."""
