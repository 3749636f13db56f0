"""Operator variants: other ways to compute the same values, with less memory or time than PyTorch's own operators.

One module per family of operators. Each has a function ``offer`` that adds its variants to a captured program; the
planner then chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..capture.captured import Captured
from ..ir.mode import WORDS, parse_mode
from . import (
    attention,
    batch_norm,
    concatenation,
    convolution,
    copy_slices,
    dense_block,
    dropit,
    dropout,
    group_norm,
    in_place,
    instance_norm,
    linear,
    linear_cross_entropy,
    low_precision,
    offload,
    pooling,
    relu,
    rms_norm,
)
from .constraints import bitwise_where_compared, obeying_marks, reading_once
from .editor import Editor, Offer

#: The functions are called in this order: gradients are split before other ways read them, in-place ways are made from
#: the other ways, and slots are merged with all their ways.
OFFERS: tuple[Offer, ...] = (
    copy_slices.offer,
    concatenation.offer,
    dense_block.offer,
    relu.offer,
    pooling.offer,
    dropout.offer,
    batch_norm.offer,
    group_norm.offer,
    instance_norm.offer,
    rms_norm.offer,
    convolution.offer,
    convolution.offer_algorithms,
    attention.offer,
    linear.offer,
    dropit.offer,
    in_place.offer,
    batch_norm.offer_backward,
    batch_norm.offer_without_reserve,
    instance_norm.offer_backward,
    linear_cross_entropy.offer,
    low_precision.offer,
    offload.offer,
)


def with_variants(captured: Captured, words: Iterable[str] = WORDS) -> Captured:
    """Add every variant that applies to a captured program; ``Program.restrict`` then keeps those that a mode admits.

    Args:
        words: the words of the mode. Slots are merged only for ways that the mode admits, and lossy variants are
            offered only if it names them.
    """
    editor = Editor(captured, frozenset(words))
    for offer in OFFERS:
        offer(editor)
    return editor.finish()


def admitted(captured: Captured, mode: str, *, ablation: bool = False) -> Captured:
    """``captured`` with the variants that ``mode`` admits; with ``ablation``, nothing may be run again."""
    words = parse_mode(mode)
    full = reading_once(with_variants(captured, words))
    return obeying_marks(
        replace(full, program=bitwise_where_compared(full.program.restrict(words, rerun=not ablation)))
    )
