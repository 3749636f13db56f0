"""Placement: where in one block of memory tensors of known lifetimes lie, so that the block is small.

The memory of a step is the most that lives at one time. An allocator that does not know what comes next needs more,
because a tensor fits into no gap that is left. Ahead of time the gaps can be avoided: see csrc/plan/placement.cpp.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ...plan.local_search.native import library, storage_of

#: Looks at a neighbour after which the search ends, and the part above the lower bound with which it is content: about
#: a second.
MOST_STEPS, GOOD_ENOUGH = 200_000_000, 0.002


class Lifetime(NamedTuple):
    """A tensor's bytes and life: from ``begin`` until just before ``end``, in any unit of order."""

    bytes: int
    begin: int
    end: int


class Placement(NamedTuple):
    """Offsets of tensors in a block of ``height`` bytes; ``least_bytes``: the most that lives at one time."""

    offsets: list[int]
    height: int
    least_bytes: int


def place(lifetimes: Sequence[Lifetime], *, most_steps: int = MOST_STEPS, seed: int = 1) -> Placement:
    """Choose offsets so that no two tensors that live at the same time overlap.

    Args:
        most_steps: of the search; 0, or without the compiled library: only the best of four simple orders.

    Returns:
        The same for the same arguments.
    """
    least = most_at_once(lifetimes)
    if (loaded := library()) is None:
        offsets = min(
            (_in_order(lifetimes, order) for order in _orders(lifetimes)), key=lambda o: _height(lifetimes, o)
        )
        return Placement(offsets, _height(lifetimes, offsets), least)
    columns = [array("q", column) for column in zip(*lifetimes, strict=True)] or [array("q")] * 3
    found = array("q", bytes(8 * len(lifetimes)))
    sizes, begin, end, out = (storage_of(column) for column in (*columns, found))
    height = loaded.monet_like_place(
        ctypes.c_int32(len(lifetimes)), begin, end, sizes, ctypes.c_int64(int((1 + GOOD_ENOUGH) * least)),
        ctypes.c_int64(most_steps), ctypes.c_uint64(seed), out,
    )  # fmt: skip
    return Placement(list(found), height, least)


def most_at_once(lifetimes: Sequence[Lifetime]) -> int:
    """The most bytes that live at one time."""
    changes = sorted([(one.begin, one.bytes) for one in lifetimes] + [(one.end, -one.bytes) for one in lifetimes])
    there = most = 0
    for _, change in changes:
        there += change
        most = max(most, there)
    return most


def _orders(lifetimes: Sequence[Lifetime]) -> list[list[int]]:
    """By size, by size times lifetime, by lifetime and by birth; as the compiled search begins."""
    keys = [
        lambda one: -one.bytes,
        lambda one: -float(one.bytes) * float(one.end - one.begin),
        lambda one: (one.begin - one.end, -one.bytes),
        lambda one: (one.begin, -one.bytes),
    ]
    return [sorted(range(len(lifetimes)), key=lambda i, key=key: key(lifetimes[i])) for key in keys]  # type: ignore[misc]


def _in_order(lifetimes: Sequence[Lifetime], order: Sequence[int]) -> list[int]:
    """Offsets if every tensor in turn gets the lowest place that is free during its life."""
    offsets = [0] * len(lifetimes)
    done: list[int] = []
    for i in order:
        one, at = lifetimes[i], 0
        there = [j for j in done if lifetimes[j].begin < one.end and one.begin < lifetimes[j].end]
        for first, last in sorted((offsets[j], offsets[j] + lifetimes[j].bytes) for j in there):
            if first - at >= one.bytes:
                break
            at = max(at, last)
        offsets[i] = at
        done.append(i)
    return offsets


def _height(lifetimes: Sequence[Lifetime], offsets: Sequence[int]) -> int:
    return max((offset + one.bytes for offset, one in zip(offsets, lifetimes, strict=True)), default=0)
