"""How a program's calls run, for the profiler and for replay alike."""
