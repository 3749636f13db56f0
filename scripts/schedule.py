"""Check a schedule by running it: ``python scripts/schedule.py MODEL BATCH BUDGET MODE SOLVER --check_diff``."""

from monet_like.__main__ import schedule_main

if __name__ == "__main__":
    schedule_main()
