"""A plan as a memory policy of torchtitan's graph trainer: what it saves and recomputes of every layer.

    monet-like export mine.json --to torchtitan --model net.py:make_model
    MONET_LIKE_POLICY=mine.torchtitan.json torchrun ... --compile.memory_policy monet_like

Import this file before the trainer starts. The graph trainer keeps sharding, collectives and CUDA graphs to itself; it
asks this policy for a tag on each forward operator. It recomputes just before a result is read, so its peak is not the
file's.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.experiments.graph_trainer.registry import register_memory_policy  # type: ignore[import-not-found]

from monet_like.errors import UsageError
from monet_like.export.policy_file import SelectivePlan, read_policy


@register_memory_policy("monet_like")  # type: ignore[untyped-decorator]
def monet_like_policy(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
    """Tag the graph by the file that $MONET_LIKE_POLICY names."""
    if "MONET_LIKE_POLICY" not in os.environ:
        raise UsageError(
            "memory policy monet_like: set MONET_LIKE_POLICY to a file of monet-like export --to torchtitan"
        )
    return tagged(gm, read_policy(Path(os.environ["MONET_LIKE_POLICY"])))


def tagged(gm: fx.GraphModule, plan: SelectivePlan) -> fx.GraphModule:
    """Tag every forward operator of the plan's regions: saved, or recomputed.

    The n-th call of an operator in a region has the answer of the n-th in the plan. Operators that the plan does not
    know, such as collectives, are recomputed where their results are not used outside of the region. Random draws are
    always saved: the graph trainer cannot repeat them.

    Raises:
        UsageError: a region calls a saved operator more or less often than the plan.
    """
    answers: dict[tuple[str, str], list[bool]] = {}
    for region in plan.regions:
        for op, saved in region.operators:
            answers.setdefault((region.module, op), []).append(saved)
    calls: Counter[tuple[str, str]] = Counter()
    region_of = {node: _region(node, plan) for node in gm.graph.nodes}
    for node, module in region_of.items():
        if module is None:
            continue
        if node.target is operator.getitem:
            node.meta["recompute"] = node.args[0].meta.get("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            continue
        key = (module, str(node.target))
        known = answers.get(key, [])
        saved = known[calls[key]] if calls[key] < len(known) else False
        calls[key] += 1
        saved |= torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
    for (module, op), known in answers.items():
        if any(known) and calls[module, op] != len(known):
            raise UsageError(
                f"the graph calls {op} {calls[module, op]} times in {module or 'the model'}, the plan {len(known)} "
                "times; plan with the dtype, inputs and attention that the trainer has"
            )
    for node, module in region_of.items():
        outside = any(not _is_backward(user) and region_of[user] != module for user in node.users)
        if module is not None and outside and node.target is not operator.getitem:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return gm


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward", False))


def _region(node: fx.Node, plan: SelectivePlan) -> str | None:
    """The region in which a forward operator was called, by the name that the trainer notes on nodes."""
    if node.op != "call_function" or _is_backward(node):
        return None
    name = (node.meta.get("custom") or {}).get("module_fqn", "")
    return next((r.module for r in plan.regions if not r.module or f"{name}.".startswith(f"{r.module}.")), None)
