"""Find the fastest training step that fits a memory budget: ``python solve.py MODEL BATCH BUDGET MODE SOLVER``."""

from monet_like.__main__ import solve_main

if __name__ == "__main__":
    solve_main()
