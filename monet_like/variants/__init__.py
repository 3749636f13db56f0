"""Operator variants: other ways to compute the same values, with less memory or time than PyTorch's own operators.

One module per family of operators. Each has a function ``offer`` that adds its variants to a captured program; the
planner then chooses among them. `register_variant` adds functions from outside the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..capture.captured import Captured
from ..ir.mode import WORDS, parse_mode
from ..ops.liger import runs_on
from .constraints import bitwise_where_compared, obeying_marks, reading_once
from .editor import Editor
from .offering import with_offers
from .plugins import in_order, register_variant, unregister_variant

__all__ = ["admitted", "register_variant", "unregister_variant", "with_variants"]


def with_variants(captured: Captured, words: Iterable[str] = WORDS, *, liger: bool | None = None) -> Captured:
    """Add every variant that applies to a captured program; ``Program.restrict`` then keeps those that a mode admits.

    A step on several devices gets none: variants are for the operators of one kind of device.

    Args:
        words: the words of the mode. Slots are merged only for ways that the mode admits, and lossy variants are
            offered only if it names them.
        liger: whether Liger's kernels are offered; None: where they run.
    """
    offers_liger = runs_on(captured.device.type) if liger is None else liger
    editor = Editor(captured, frozenset(words), liger=offers_liger)
    return with_offers(editor, {} if captured.on_several_devices else in_order())


def admitted(captured: Captured, mode: str, *, ablation: bool = False, liger: bool | None = None) -> Captured:
    """``captured`` with the variants that ``mode`` admits; with ``ablation``, nothing may be run again.

    Args:
        liger: as of `with_variants`.
    """
    words = parse_mode(mode)
    full = reading_once(with_variants(captured, words, liger=liger))
    program = bitwise_where_compared(full.program.restrict(words, rerun=not ablation))
    return obeying_marks(replace(full, program=program, without_variants=captured))
