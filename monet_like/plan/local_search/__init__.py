"""Search by steps: schedules from a few decisions, improved one at a time."""
