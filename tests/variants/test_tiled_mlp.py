"""MLPs in tiles along the rows: where they are found, that they are right, and what they save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from replays import replayed
from taking import error_of, taking
from torch import nn

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.ir.simulate import Free, simulate
from monet_like.variants import admitted

MODE = "inplace_conv_multiway_newnode"
Example = tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


class Gated(nn.Module):
    """Llama's MLP with a residual around it."""

    def __init__(self, width: int, inner: int, *, bias: bool = False, adapter: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.a = self.b = None
        if adapter:  # LoRA
            for layer in (self.gate, self.up, self.down):
                layer.requires_grad_(False)
            self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        up = self.up(h)
        if self.a is not None and self.b is not None:
            up = up + self.b(self.a(h))
        return x + self.down(nn.functional.silu(self.gate(h)) * up)


class Plain(nn.Module):
    """GPT's."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(nn.functional.gelu(self.one(self.norm(x)), approximate="tanh"))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: Gated(8, 24),
    "biases": lambda: Gated(8, 24, bias=True),
    "adapter": lambda: Gated(8, 24, adapter=True),
    "gelu": lambda: Plain(8, 32),
}


VARIANTS = ("tiled_mlp.1", "tiled_mlp.16", "tiled_mlp_from_products.4")


def example(kind: str, dtype: torch.dtype, rows: int = 19) -> Example:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), KINDS[kind](), KINDS[kind]()).to(dtype)
    return model.train(), (torch.randn(2, rows, 8, dtype=dtype),), {}


def names(captured: Captured) -> Counter[str]:
    return Counter(t.variant for t in captured.program.every_task() if t.variant.startswith("tiled_mlp"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_mlp_is_found(kind: str) -> None:
    found = names(admitted(capture(*example(kind, torch.float32)), MODE))
    assert found == {
        **{f"tiled_mlp.{tiles}": 4 for tiles in (4, 16)},  # forward and backward of two MLPs
        **{f"tiled_mlp_from_products.{tiles}": 2 for tiles in (1, 4, 16)},
        "tiled_mlp.1": 2,
    }


@pytest.mark.slow(every=5)
@pytest.mark.parametrize(
    ("kind", "variant", "dtype", "within"),
    [
        ("gated", VARIANTS[0], torch.float64, 1e-13),
        *((kind, variant, torch.float64, 1e-13) for kind in KINDS for variant in VARIANTS[1:]),
        ("gated", VARIANTS[1], torch.bfloat16, 1e-2),
        ("gelu", VARIANTS[2], torch.bfloat16, 1e-2),
    ],
)
def test_gradients_are_those_of_the_whole(kind: str, variant: str, dtype: torch.dtype, within: float) -> None:
    """Rows that are no multiple of the tiles; forward in tiles where the variant needs nothing but the input."""
    model, args, kwargs = example(kind, dtype)
    captured = admitted(capture(model, args, kwargs), MODE)
    program = captured.program
    schedule = taking(captured, *["tiled_mlp.4"] * variant.startswith("tiled_mlp."), ways=[variant])
    assert sum(slot[way].variant == variant for slot, way in zip(program.slots, schedule.ways, strict=True)) == 2
    simulate(program, schedule, Free())
    assert error_of((model, args, kwargs), captured, schedule) < within


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not there")
def test_products_by_onednn_are_still_offered() -> None:
    captured = admitted(capture(*example("gated", torch.float32)), MODE)
    slots = [slot for slot in captured.program.slots if any(way.variant == "tiled_mlp.1" for way in slot)]
    assert [[way.variant for way in slot[:2]] for slot in slots] == [["aten", "linear.onednn"]] * 2
    calls = [call.op for call in slots[0][1].calls if "linear" in call.op or "mm" in call.op]
    assert len(calls) == 6 and len({op for op in calls if op != "aten.mm.default"}) == 1


def test_a_value_that_something_else_reads_is_no_mlps_own() -> None:
    class Told(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = nn.functional.silu(self.gate(x)) * self.up(x)
            return self.down(inner).sum() + inner.mean()

    assert not names(admitted(capture(Told(8, 24).train(), (torch.randn(32, 8),)), MODE))
    few = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).train(), (torch.randn(32, 64),), {})
    assert not names(admitted(capture(*few), MODE))  # as wide inside as outside


def test_smaller_inputs_have_the_same_program() -> None:
    """Fewer rows than tiles, too; that some tiles are empty changes no gradient."""
    model, (x,), _ = example("gated", torch.float64)
    fingerprints = {admitted(capture(model, (x[:1, :rows],)), MODE).program.fingerprint for rows in (19, 11, 5)}
    assert len(fingerprints) == 1
    few = (model, (x[:, :3],), {})
    captured = admitted(capture(*few), MODE)
    assert error_of(few, captured, taking(captured, ways=["tiled_mlp.16"])) < 1e-13


def test_wide_activations_of_one_tile_exist_at_once() -> None:
    """Measured: 1/16 of three activations and three gradients of the width of the MLP, and the gradients of weights."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Gated(8, 512)).train(), torch.randn(1024, 8)
    captured = admitted(capture(model, (x,)), MODE)
    rises = {}
    for variant in ("", "tiled_mlp.1", "tiled_mlp.16"):
        schedule = taking(captured, *["tiled_mlp.16"] * bool(variant), ways=[variant])
        rises[variant] = replayed((model, (x,), {}), captured, schedule, MODE).rise_bytes
    wide = 1024 * 512 * 4
    assert rises[""] > 4 * wide
    assert rises["tiled_mlp.16"] < wide
    assert rises["tiled_mlp.1"] > 3 * wide
