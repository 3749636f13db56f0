"""The memory policy for torchtitan's graph trainer, against a stand-in of its registry, with PyTorch's own pass that
recomputes.

torchtitan itself cannot be installed here. Its registry is a dict of functions ``(gm, *, config) -> gm``, and the graph
trainer notes ``module_fqn`` on nodes; both are made here alike. The graph is traced and recomputed by PyTorch.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.fx.traceback
from click.testing import CliRunner, Result
from torch import fx, nn
from torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass import (
    remat_using_tags_for_fwd_loss_bwd_graph,
)
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import monet_like
from monet_like.cli.group import main
from monet_like.errors import UsageError
from monet_like.export.policy_file import read_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_policy.py"
NAME = "torchtitan.experiments.graph_trainer.registry"


class StandInForTheRegistry(ModuleType):
    """What `torchtitan.experiments.graph_trainer.registry` offers to policies."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.MEMORY_POLICY_REGISTRY: dict[str, Callable[..., fx.GraphModule]] = {}

    def register_memory_policy(self, key: str) -> Callable[[Any], Any]:
        def decorator(function: Any) -> Any:
            self.MEMORY_POLICY_REGISTRY[key] = function
            return function

        return decorator


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> StandInForTheRegistry:
    made = StandInForTheRegistry()
    parts = NAME.split(".")
    for count in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    monkeypatch.setitem(sys.modules, NAME, made)
    runpy.run_path(str(EXAMPLE))
    return made


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        width = 64
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
            for _ in range(4)
        )
        if dropout:
            for layer in self.layers:
                layer.append(nn.Dropout(dropout))
        self.lm_head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x)


def with_dropout() -> nn.Module:
    """For `monet-like solve`, which finds it by the name of this file."""
    torch.manual_seed(0)
    return Model(0.1)


def traced(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    """The graph of forward, loss and backward, with the notes of the graph trainer."""
    names = dict(model.named_parameters())

    def step(parameters: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        loss = functional_call(model, dict(zip(names, parameters, strict=True)), (x,)).square().mean()
        return [loss, *torch.autograd.grad(loss, parameters)]

    forwards = {}
    for name, module in model.named_modules():
        if name:
            forwards[module] = module.forward
            module.forward = torch.fx.traceback.annotate_fn({"module_fqn": name})(module.forward)
    try:
        with torch.fx.traceback.preserve_node_meta():
            gm = make_fx(step)(list(names.values()), x)
    finally:
        for module, forward in forwards.items():
            module.forward = forward
    backward = False
    # Dynamo notes it; here the first operator of the backward is the one of the loss's gradient.
    for node in gm.graph.nodes:
        backward |= "ones_like" in str(node.target)
        if backward and node.op == "call_function":
            node.meta["autograd_backward"] = True
    return gm


def planned(model: nn.Module, x: torch.Tensor, budget: str, path: Path) -> monet_like.export.selective.SelectivePolicy:
    plan = monet_like.problem(model, x, mode="normal", verbose=False).plan(budget, solver="heuristic")
    policy = monet_like.checkpoint_policy(plan, regions="layers.*")
    policy.save(path)
    return policy


@pytest.mark.slow
def test_gradients_are_equal_and_saved_results_are_those_of_the_plan(
    registry: StandInForTheRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(256, 64)
    policy = planned(model, x, "80%", tmp_path / "p.json")
    monkeypatch.setenv("MONET_LIKE_POLICY", str(tmp_path / "p.json"))
    gm = traced(model, x)
    parameters = list(model.parameters())
    wanted = gm(parameters, x)
    before = sum(node.op == "call_function" for node in gm.graph.nodes)
    gm = registry.MEMORY_POLICY_REGISTRY["monet_like"](gm, config=None)
    for region in policy.plan.regions:
        mine = [
            n
            for n in gm.graph.nodes
            if (n.meta.get("custom") or {}).get("module_fqn", "").startswith(f"{region.module}.")
        ]
        saved = [str(n.target) for n in mine if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
        chosen = [op for op, is_saved in region.operators if is_saved]
        # The last product and its view leave the layer, so that they are saved, and parts of a result follow it.
        others = ("aten.view.default", "aten.addmm.default", "<built-in function getitem>")
        assert [op for op in saved if op not in others] == [op for op in chosen if op not in others]
        assert set(chosen) <= set(saved)
    gm = remat_using_tags_for_fwd_loss_bwd_graph(gm)
    assert sum(node.op == "call_function" for node in gm.graph.nodes) > before  # something runs again
    found = gm(*parameters, x)  # the pass makes a graph of flat arguments
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
def test_another_model_is_refused(
    registry: StandInForTheRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(256, 64)
    policy = planned(model, x, "90%", tmp_path / "p.json")
    saved = next(op for op, is_saved in policy.plan.regions[0].operators if is_saved)
    monkeypatch.setenv("MONET_LIKE_POLICY", str(tmp_path / "p.json"))
    model.layers[0] = nn.Identity()
    with pytest.raises(UsageError, match=f"the graph calls {saved} 0 times in layers.0, the plan"):
        registry.MEMORY_POLICY_REGISTRY["monet_like"](traced(model, x), config=None)


def test_without_a_file_it_says_what_is_needed(
    registry: StandInForTheRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MONET_LIKE_POLICY", raising=False)
    with pytest.raises(UsageError, match="set MONET_LIKE_POLICY to a file of monet-like export --to torchtitan"):
        registry.MEMORY_POLICY_REGISTRY["monet_like"](fx.GraphModule({}, fx.Graph()), config=None)


@pytest.mark.slow
def test_the_command_writes_what_the_policy_reads(
    registry: StandInForTheRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = f"{Path(__file__)}:with_dropout"

    def exported(budget: str, to: str) -> Result:
        solve = f"solve '{model}' 256 {budget} normal heuristic --input-shape 64 --out m.json --quiet"
        done = CliRunner().invoke(main, solve)
        assert done.exit_code == 0, done.output
        regions = ("--regions", "layers.*") if to == "sac" else ()
        return CliRunner().invoke(main, ("export", "m.json", "--to", to, "--model", model, "--json", *regions))

    # So little memory that checkpointing must draw masks again, which torchtitan cannot.
    assert exported("55%", "sac").exit_code == 0
    assert not all(
        s for r in read_policy(tmp_path / "m.sac.json").regions for op, s in r.operators if "bernoulli" in op
    )
    refused = exported("55%", "torchtitan")
    assert refused.exit_code != 0
    assert "selective checkpointing cannot fit" in refused.output
    done = exported("60%", "torchtitan")
    assert done.exit_code == 0, done.output
    plan = read_policy(tmp_path / "m.torchtitan.json")
    assert json.loads(done.stdout) == plan.content()
    assert [region.module for region in plan.regions] == [f"layers.{k}" for k in range(4)]
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    draws = [saved for region in plan.regions for op, saved in region.operators if "dropout" in op or "bernoulli" in op]
    assert draws == 4 * [True]
    assert not all(saved for region in plan.regions for _, saved in region.operators)

    made, x = with_dropout(), torch.randn(256, 64)
    gm = traced(made, x)
    parameters = list(made.parameters())
    torch.manual_seed(2)
    wanted = gm(parameters, x)
    monkeypatch.setenv("MONET_LIKE_POLICY", "m.torchtitan.json")
    before = sum(node.op == "call_function" for node in gm.graph.nodes)
    gm = remat_using_tags_for_fwd_loss_bwd_graph(registry.MEMORY_POLICY_REGISTRY["monet_like"](gm, config=None))
    assert sum(node.op == "call_function" for node in gm.graph.nodes) > before  # something runs again
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(gm(*parameters, x), wanted, strict=True))


def test_regions_are_of_policies_alone() -> None:
    refused = CliRunner().invoke(main, ("export", "n.json", "--to", "inductor", "--regions", "a"))
    assert refused.exit_code == 2
    assert "give --to sac, torchtitan or remat, or leave them out for --to inductor" in refused.output
