"""Regions of torch_remat by a plan: a step equals plain PyTorch's, and its memory is what was predicted."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from later import Later
from torch import nn

import monet_like
from monet_like.cli.group import main
from monet_like.errors import InfeasibleError, ScheduleFileError, UsageError
from monet_like.export.remat import RematPlan, remat_plan
from monet_like.replay.verify.steps import step_peak

pytest.importorskip("torch_remat")
transformers = Later("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "remat_regions.py"
CPU = torch.device("cpu")
#: The loss and its gradients, numbers that some results of a step hold a little longer.
ALLOWANCE_BYTES = 256


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention, self.drop1 = nn.LayerNorm(32), Attention(), nn.Dropout(dropout)
        self.norm2, self.up, self.act, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.down(self.act(self.up(self.norm2(x)))))


class Convolutions(nn.Module):
    """Batch norms change their buffers, so they are always saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1, self.relu = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm2(self.second(self.relu(self.norm1(self.first(x))))))


class InPlace(nn.Module):
    """What reads a tensor before it is changed in place is saved with what makes it, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.act(self.first(x)))


def decoder(dropout: float = 0.1) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Sequential(*(Layer(dropout) for _ in range(3))), nn.Linear(32, 50))
    return model, torch.randint(0, 50, (8, 48))


def resnet() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Convolutions() for _ in range(3)))
    return nn.Sequential(nn.Conv2d(3, 16, 3), layers, nn.AvgPool2d(8)), torch.randn(8, 3, 18, 18)


def in_place() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Sequential(*(InPlace() for _ in range(3)))), torch.randn(256, 8)


def planned(model: nn.Module, x: torch.Tensor, budget: str, regions: str = "1.*") -> RematPlan:
    plan = monet_like.problem(model, x, mode="normal", verbose=False).plan(budget, quick=True)
    return remat_plan(plan.record, plan.ready, plan.request, plan.device, (regions,))


def applied(model: nn.Module, plan: RematPlan) -> nn.Module:
    done: nn.Module = runpy.run_path(str(EXAMPLE))["apply"](copy.deepcopy(model), plan)
    return done


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Loss, gradients and buffers of two steps, and the random state after them."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]
        found += [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
    return found


@pytest.mark.slow(but=["decoder-85%"])
@pytest.mark.parametrize(
    ("make", "budget"),
    [(decoder, "85%"), (decoder, "78%"), (resnet, "92%"), (in_place, "80%")],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_steps_are_plain_and_memory_is_as_predicted(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], budget: str
) -> None:
    model, x = make()
    plan = planned(model, x, budget)
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert plan.bound_seconds <= plan.seconds
    mine = applied(model, plan)
    assert all(map(torch.equal, trained(copy.deepcopy(model), x), trained(mine, x)))
    assert 0 <= plan.peak_bytes - step_peak(mine, ((x,), {}), CPU) <= ALLOWANCE_BYTES


@pytest.mark.slow
def test_no_choice_of_regions_is_faster() -> None:
    """Of all choices of saved modules, run by the simulator, the plan's is the fastest that fits."""
    from monet_like.export import remat
    from monet_like.export.selection import report_of

    model, x = decoder(0.0)
    plan = monet_like.problem(model, x, mode="normal", verbose=False).plan("85%", quick=True)
    steps: list[Any] = []

    def choosing(step: Any, budget: int, **others: Any) -> Any:
        steps.append(step)
        return remat_choose(step, budget, **others)

    remat_choose = remat.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remat, "choose", choosing)
        found = remat_plan(plan.record, plan.ready, plan.request, plan.device, ("1.*",))
    (step,) = steps
    free = [i for i, item in enumerate(step.items) if item.region == 0 and not item.never]
    best = float("inf")
    for count in range(len(free) + 1):
        for chosen in combinations(free, count):
            saved = {*chosen, *(j for i in chosen for j in step.items[i].implies)}
            closed = all(set(step.items[i].implies) <= saved for i in saved)
            if closed and not any(step.items[i].never for i in saved):
                report = report_of(step, frozenset(saved))
                if report.peak_bytes <= found.budget_bytes:
                    best = min(best, report.seconds)
    assert found.seconds <= best * 1.002
    assert found.bound_seconds <= best


@pytest.mark.slow
def test_layers_of_hugging_face() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=3, use_cache=False, **sizes)
    ).train()
    ids = torch.randint(0, 64, (8, 64))
    problem = monet_like.problem(model, kwargs={"input_ids": ids, "labels": ids}, mode="normal", verbose=False)
    plan = problem.plan("85%", quick=True)
    found = remat_plan(plan.record, plan.ready, plan.request, plan.device, ("model.layers.*",))
    assert found.layers == tuple(f"model.layers.{k}" for k in range(3)) and found.regions
    mine = applied(model, found)
    for net in (model, mine):
        net(input_ids=ids, labels=ids).loss.backward()
    gradients = [[p.grad for p in net.parameters()] for net in (model, mine)]
    assert all(map(torch.equal, *gradients))


class Drawing(nn.Module):
    """Draws outside of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), 0.1, self.training)


class Twice(nn.Module):
    """Calls a module that draws twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.layer(self.dropout(x)))


@pytest.mark.slow(but=["Drawing"])
@pytest.mark.parametrize(("layer", "who"), [(Drawing, r"1\.0"), (Twice, r"1\.0\.dropout")])
def test_what_cannot_be_saved_is_refused(layer: type[nn.Module], who: str) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Sequential(layer(), layer()))
    with pytest.raises(UsageError, match=rf"{who} draws random numbers .* a submodule that is called once"):
        planned(model, torch.randn(64, 8), "95%")


@pytest.mark.slow
def test_a_budget_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"cannot fit the step into .* it needs .*; give that much"):
        planned(*decoder(), "55%")


NET = """import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make_inputs(batch):
    return torch.randn(batch, 64)
"""


def test_the_command_and_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(NET)
    model, file = f"{tmp_path}/net.py:Net", tmp_path / "mine.json"

    def run(*words: str) -> str:
        done = CliRunner().invoke(main, [*words, "--device", "cpu"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    run("solve", model, "1024", "85%", "normal", "--quick", "--out", str(file))
    assert "saved in each: " in run("export", str(file), "--to", "remat", "--model", model)
    content = json.loads((tmp_path / "mine.remat.json").read_text())
    assert content["layers"] == ["layers.0", "layers.1", "layers.2"]
    assert content["save_regions"] == [region["name"] for region in content["regions"]]
    assert set(content["save_regions"]) <= {"up", "act", "down"}
    assert RematPlan.read(tmp_path / "mine.remat.json").content() == content
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), str(tmp_path / "mine.remat.json"), model, "--batch", "64"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": "monet_like remat plan", "version": 1, "layers": [1]}')
    with pytest.raises(ScheduleFileError, match=r"is no remat plan of monet_like: .*; write it again"):
        RematPlan.read(tmp_path / "a.json")
