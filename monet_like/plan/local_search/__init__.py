"""Local search: policies, the few decisions from which a whole schedule follows, improved by simulated annealing."""
