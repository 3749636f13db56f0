"""Compiled models that start again: plans come from this package's cache, and code from Inductor's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import uncompiled
from torch import nn

import monet_like
from monet_like.files import cache_folder
from monet_like.inductor import handed
from monet_like.ir.json_fields import digest_of_fields


class Layer(nn.Module):
    """A product, and kernels that Inductor fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + self.product(x).tanh().softmax(-1)


class Graphs(nn.Module):
    """Layers in a graph each. The last two are equal, and have what the graphs before leave of a budget."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Layer(), Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.third(x)


def started(budget: str = "2 MB", *, compiles: bool = False) -> dict[str, Any]:
    """A start of a process that trains: gradients, plans, and what was taken from which cache.

    Args:
        compiles: Inductor writes and compiles code, of one graph.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, x = Layer() if compiles else Graphs(), torch.randn(256, 32)
    options = {**monet_like.compile_options(budget, quick=True, time_limit_seconds=1.0), "fx_graph_cache": True}
    how: dict[str, Any] = {"options": options} if compiles else {"backend": uncompiled(options)}
    torch.compile(model, **how, dynamic=False)(x).sum().backward()
    graphs = options["custom_partitioner_fn"].graphs
    return {
        "gradients": [p.grad.tolist() for p in model.parameters() if p.grad is not None],
        "found": [graph.plan.found_by for graph in graphs],
        "plans": [[graph.budget_bytes, graph.peak_bytes, list(graph.saved), graph.saved_bytes] for graph in graphs],
        "kept": counters["inductor"]["fxgraph_cache_hit"],
        "lowered": counters["inductor"]["fxgraph_cache_miss"],
        "not planned": counters["aot_autograd"]["autograd_cache_hit"],
    }


def test_a_second_start_plans_nothing() -> None:
    first, second, other = started(), started(), started("1.9 MB")
    assert len(first["found"]) == 3 and "cache" not in first["found"] + other["found"]
    assert second["found"] == ["cache"] * 3
    _, (budget, *plan), (left, *equal) = first["plans"]
    assert left < budget and plan[-1] == equal[-1]
    assert second["plans"] == first["plans"] and second["gradients"] == first["gradients"]


@pytest.mark.parametrize("damage", ["{", '{"format": "monet_like compiled graph", "version": 1}', "larger", "shorter"])
def test_damaged_files_are_planned_anew(damage: str) -> None:
    first = started()
    for path in (files := [*cache_folder().glob("graph_*.json")]):
        content = json.loads(path.read_text())
        if damage == "larger":  # a bit has changed
            content["graphs"][0]["saved_bytes"] += 1
        elif damage == "shorter":  # it is of another graph
            del content["sha256"]
            content["graphs"][0]["schedule"]["forward"].pop()
            content["sha256"] = digest_of_fields(content)
        path.write_text(json.dumps(content) if damage in ("larger", "shorter") else damage)
    with pytest.warns(UserWarning, match="a compiled graph is planned anew: "):
        again = started()
    assert len(files) == 3 and "cache" not in again["found"] and again["gradients"] == first["gradients"]


def started_twice() -> list[dict[str, Any]]:
    """Two starts; in the second one every kernel is in a group of its own, with the same plans."""
    runs_of: Callable[..., Any] = handed.runs_of

    def apart(*args: Any) -> Any:
        return tuple([replace(run, group=100 + k) for k, run in enumerate(runs)] for runs in runs_of(*args))

    found = [started(compiles=True)]
    handed.runs_of = apart
    return [*found, started(compiles=True)]


@pytest.mark.slow
def test_a_second_process_lowers_only_graphs_in_other_groups(tmp_path: Path) -> None:
    def ran(function: str) -> Any:
        code = f"import json, test_second_start; print('found', json.dumps(test_second_start.{function}))"
        paths = [Path(__file__).parent, Path(__file__).parents[1] / "helpers", Path(monet_like.__file__).parents[1]]
        own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("found "))
        return json.loads(line.removeprefix("found "))

    first = ran("started(compiles=True)")
    second, other = ran("started_twice()")
    assert "cache" not in first["found"] and second["found"] == other["found"] == ["cache"]
    assert second["plans"] == first["plans"] and second["gradients"] == first["gradients"]
    assert [start["kept"] for start in (first, second, other)] == [0, 2, 0]
    assert [start["lowered"] for start in (first, second, other)] == [2, 0, 2]
    assert not any(start["not planned"] for start in (first, second, other))
