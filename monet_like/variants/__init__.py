"""Variants: more ways to do the same thing. One file per operator family, each with one function ``offer``."""

from __future__ import annotations

from ..capture import Captured
from . import batch_norm, convolution, dropout, in_place, pooling, relu
from .editor import Editor, Offer

#: In this order: in-place forms need the other ways, and slots are merged with all their ways.
OFFERS: tuple[Offer, ...] = (
    relu.offer,
    pooling.offer,
    dropout.offer,
    batch_norm.offer,
    convolution.offer,
    in_place.offer,
    batch_norm.offer_backward,
)


def with_variants(captured: Captured) -> Captured:
    """``captured`` with every variant that applies; ``Program.restrict`` then takes those that a mode admits."""
    editor = Editor(captured)
    for offer in OFFERS:
        offer(editor)
    return editor.finish()
