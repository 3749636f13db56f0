"""Tests of the CUDA kernels on a CPU: ``python -m tests.cuda_emulator [--rounds N] [--mutants] [pytest's
arguments]``.
"""

from __future__ import annotations

import sys

from .session import main

sys.exit(main(sys.argv[1:]))
