"""A kernel of a joint graph: what becomes one task of its program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .joint import is_generated


@dataclass(frozen=True)
class Kernel:
    """One kernel: what it reads from memory, what it computes on the way, and what it writes.

    Attributes:
        root: the node whose result is written; None: nothing is, it only returns what it reads.
        reads: items and inputs, in the order of the graph.
        inlined: nodes that are computed on the way, in the order of the graph.
        writes: ``root``, or the parts of its result.
    """

    root: fx.Node | None
    reads: tuple[fx.Node, ...]
    inlined: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]

    @property
    def generated(self) -> bool:
        """Whether Inductor generates its code."""
        return self.root is not None and is_generated(self.root)
