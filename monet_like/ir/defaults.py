"""What the command line and the Python interface take where nothing else is asked for."""

from __future__ import annotations

#: The mode: every operator variant that is exact but for rounding.
MODE = "inplace_conv_multiway_newnode"
#: The same without those that round in another way than PyTorch's own operators.
EXACT_MODE = "inplace_multiway_newnode"
#: The solver of the integer program.
SOLVER = "HIGHS"
