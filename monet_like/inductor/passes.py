"""Passes of Inductor's scheduler with an identity: graphs that a plain function has changed are not in its cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch._inductor import custom_graph_pass

from .._version import __version__

#: PyTorch 2.11 has one class for all passes.
_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


class SchedulerPass(_Pass):
    """A function of the scheduler's nodes. What it does depends on this package's code, and on the names of a graph's
    nodes, which the cache has in its key (`monet_like.inductor.emission`).
    """

    def __init__(self, function: Callable[[list[Any]], list[Any]]) -> None:
        self.function = function

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes as they are scheduled."""
        return self.function(nodes)

    def uuid(self) -> str:
        """Changes with the code."""
        return code_digest()


@cache
def code_digest() -> str:
    """A digest of what makes graphs of plans: the version, and the modules beside this one."""
    found = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
