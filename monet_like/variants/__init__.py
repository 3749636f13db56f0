"""Variants: more ways to do the same thing. One file per operator family, each with one function ``offer``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..capture.captured import Captured
from ..ir.mode import WORDS, parse_mode
from . import (
    algorithms,
    attention,
    batch_norm,
    concatenation,
    convolution,
    dense_block,
    dropit,
    dropout,
    group_norm,
    in_place,
    linear,
    linear_cross_entropy,
    low_precision,
    offload,
    pooling,
    relu,
    rms_norm,
)
from .compared import bitwise_where_compared
from .constraints import obeying_marks, reading_once
from .editor import Editor, Offer

#: In this order: gradients are split before other ways read them, in-place forms need the other ways, and slots are
#: merged with all their ways.
OFFERS: tuple[Offer, ...] = (
    concatenation.offer,
    dense_block.offer,
    relu.offer,
    pooling.offer,
    dropout.offer,
    batch_norm.offer,
    group_norm.offer,
    rms_norm.offer,
    convolution.offer,
    algorithms.offer,
    attention.offer,
    linear.offer,
    dropit.offer,
    in_place.offer,
    batch_norm.offer_backward,
    linear_cross_entropy.offer,
    low_precision.offer,
    offload.offer,
)


def with_variants(captured: Captured, words: Iterable[str] = WORDS) -> Captured:
    """``captured`` with every variant that applies; ``Program.restrict`` then takes those that a mode admits.

    Args:
        words: of the mode: slots are merged only for ways that it admits, and lossy ones offered only if it names them.
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
