"""Small models drawn from a grammar, compared with plain PyTorch step by step, and made smaller where they differ.

``draw`` makes a `Case` from a seed, ``judge`` compares a case with plain PyTorch, ``minimise`` makes a case that fails
smaller while it fails in the same way. A case is plain data; `Case.source` is the model as Python code.
"""

from .cases import Case, Op
from .drawing import draw
from .judging import Verdict, judge, known_end
from .minimising import minimise, reproduction

__all__ = ["Case", "Op", "Verdict", "draw", "judge", "known_end", "minimise", "reproduction"]
