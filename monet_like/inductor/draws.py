"""Whether a graph of Inductor draws the random numbers that plain PyTorch draws."""

from __future__ import annotations

import importlib

import torch
from torch import fx

from ..errors import UsageError
from .joint import draws, name_of

#: What makes PyTorch's operators draw in the order and the layouts of the graph; PyTorch 2.11 has neither.
_KEPT_DRAWS = (
    ("torch._inductor.fx_passes.post_grad", "_chain_random_ops_for_ordering"),
    ("torch._inductor.lowering", "constrain_to_fx_strides_if_fallback_random"),
)


def check_draws(graph: fx.Graph, expected: int) -> None:
    """Check that a graph draws random numbers so often, by dropout and attention alone, which draw as in plain PyTorch.

    Raises:
        UsageError: it does not.
    """
    found = [name_of(node) for node in graph.nodes if node.op == "call_function" and draws(node)]
    if len(found) != expected or not all(n == "aten::native_dropout" or "scaled_dot_product" in n for n in found):
        raise UsageError("it draws other random numbers in Inductor's graph than in plain PyTorch")
    if found and not all(hasattr(importlib.import_module(module), name) for module, name in _KEPT_DRAWS):
        raise UsageError(f"Inductor of PyTorch {torch.__version__} may draw its random numbers in another order")
