"""Collectives in a joint graph: each runs once, and all run in the order of the graph, whatever the plan is.

So processes whose plans differ communicate alike. A collective and the waits for its results are one kernel, which
Inductor does not generate. Its results are those of the waits: nothing can read or save what has not arrived.

A collective that neither the forward's results nor its effects need belongs to the backward, as what depends on an
incoming gradient does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from ..errors import UsageError
from ..runtime.operators import communicates, waits

_IN_A_COPY = frozenset({"_c10d_functional::all_reduce", "_c10d_functional::broadcast"})
#: They receive into a tensor, but do not say so.
_POINT_TO_POINT = ("isend", "irecv", "batch_p2p_ops")


def is_part(node: fx.Node) -> bool:
    """Whether it only names a result of another node, which makes it: one of several, or one that has arrived."""
    return node.target is operator.getitem or waits(node.target)


def writes_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that others read when this one has run: the parts of its result, or itself."""
    parts = tuple(part for user in node.users if is_part(user) for part in writes_of(user))
    return parts or (node,)


def begins_as_copy(node: fx.Node) -> bool:
    """Whether Inductor has the result made within a copy of the one input, so that it may take over its memory."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _IN_A_COPY


def check_collective(node: fx.Node) -> None:
    """Check a node that may be a collective or wait for one.

    Raises:
        UsageError: a plan cannot express it.
    """
    if waits(node.target):
        source = node.all_input_nodes[0]
        if not communicates((source.all_input_nodes[0] if source.target is operator.getitem else source).target):
            raise UsageError(
                f"{node.name} waits for a collective that began outside of this graph, which compile_options cannot "
                "plan; wait for its result before the compiled part of the model"
            )
    if not communicates(node.target):
        return
    target: torch._ops.OpOverload = node.target  # type: ignore[assignment]
    if target._schema.is_mutable or target._opname in _POINT_TO_POINT:
        raise UsageError(
            f"{node.name} communicates in place or with one other process, which compile_options cannot plan; compile "
            "the blocks between such calls"
        )
    if target.namespace == "_c10d_functional" and not all(waits(reader.target) for reader in _readers(node)):
        raise UsageError(
            f"{node.name} is a collective whose result is read otherwise than by a wait for this result alone, which "
            "compile_options cannot plan"
        )


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads the results of a call."""
    for user in node.users:
        if user.target is operator.getitem:
            yield from _readers(user)
        else:
            yield user
