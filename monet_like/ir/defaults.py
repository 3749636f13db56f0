"""What the command line and the Python interface take where nothing else is asked for."""

from __future__ import annotations

#: The mode: every operator variant that is exact.
MODE = "inplace_conv_multiway_newnode"
#: The solver of the integer program.
SOLVER = "HIGHS"
