"""Steps of models that are no decoders: pieces are found in what the step does, and their peak is that of the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from monet_like import fits
from monet_like.auto.fits.named import named
from monet_like.auto.fits.pieces import CUDA, Capturing, Pieces, _bounds
from monet_like.auto.fits.points import priced
from monet_like.auto.fits.question import Question, read_question
from monet_like.auto.fits.step import step_of
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError, UsageError
from monet_like.ir.step import peak_of
from monet_like.plan.baseline import plain_report
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline

CARD = DEVICES["a100"]


class Modulated(nn.Module):
    """A layer of a diffusion transformer: time shifts and scales what attention and MLP read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.shifts = nn.Linear(width, 3 * width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.shifts(nn.functional.silu(time))[:, None].chunk(3, -1)
        heads = self.attention(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, 4, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + gate * self.joined(attended)
        result: torch.Tensor = x + self.mlp(self.norm(x))
        return result


class Diffusion(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.patches, self.time = nn.Linear(16, width), nn.Linear(8, width)
        self.layers = nn.ModuleList(Modulated(width) for _ in range(layers))
        self.out = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x, embedded = self.patches(x), self.time(time)
        for layer in self.layers:
            x = layer(x, embedded)
        result: torch.Tensor = self.out(x)
        return result


class Convolutions(nn.Module):
    """Two convolutions with group norms and activations in place, as in U-Nets for volumes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.leaky_relu(norm(convolution(x)), inplace=True)
        return x


class Skips(nn.Module):
    """Equal layers whose results wait for later ones: skip connections."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(Convolutions(channels) for _ in range(2))
        self.up = nn.ModuleList(Convolutions(channels) for _ in range(2))
        self.out = nn.Conv2d(channels, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(x), []
        for layer in self.down:
            skips.append(layer(x))
            x = nn.functional.avg_pool2d(skips[-1], 2)
        for layer in self.up:
            x = layer(nn.functional.interpolate(x, scale_factor=2.0) + skips.pop())
        result: torch.Tensor = self.out(x)
        return result


class Moved(nn.Module):
    """The result of a layer is changed in place behind it, so that the layer is no piece by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.place = nn.ModuleList(Modulated(32) for _ in range(4)), nn.Parameter(torch.empty(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = x.new_ones(x.shape[0], 32)
        for number, layer in enumerate(self.layers):
            x = layer(x, time)
            if number == 1:
                x += self.place
        return x


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 3  # not what autograd would make of the forward


class Repeated(nn.Module):
    """One layer that runs three times, frozen features before it, and a custom function behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 32), nn.Tanh()).requires_grad_(False)
        self.layer = Modulated(32)
        self.out = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, time = self.features(x), x.new_ones(x.shape[0], 32)
        for _ in range(3):
            x = self.layer(x, time)
        result: torch.Tensor = Halved.apply(self.out(x))
        return result


class Cast(Diffusion):
    """Layers under autocast for a GPU that is not here."""

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return super().forward(x, time).float()


#: Model, inputs, and the kinds of its parts.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], list[int]]] = {
    "diffusion": (Diffusion, (torch.empty(2, 64, 16), torch.empty(2, 8)), [0, 1, 1, 1, 2]),
    "cast": (Cast, (torch.empty(2, 64, 16), torch.empty(2, 8)), [0, 1, 1, 1, 2]),
    "skips": (Skips, (torch.empty(2, 3, 32, 32),), [0, 1, 2, 3, 4, 3, 5, 1, 6]),
    "moved": (Moved, (torch.empty(2, 6, 32),), [-1, 0, 1, 2, 2]),
    "repeated": (Repeated, (torch.empty(2, 6, 16),), [-1, 0, 1, 1, 2]),
}


@functools.cache
def asked_about(name: str) -> tuple[nn.Module, Question, Pieces]:
    make, inputs, _ = MODELS[name]
    with torch.device("meta"):
        model = make()
    asked = read_question(model, inputs, optimizer="none")
    return model, asked, Capturing(asked).at(2, 0, CARD.capability)


@pytest.mark.slow(but=["diffusion"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_by_pieces_is_that_of_the_whole(name: str) -> None:
    model, asked, pieces = asked_about(name)
    assert [part.kind for part in pieces.ranges] == MODELS[name][2]
    gradients = dict(gradient for part in pieces.ranges for gradient in part.gradients)
    assert len(gradients) == sum(parameter.requires_grad for parameter in model.parameters())
    points = [priced(piece.captured, (), roofline(piece.captured, CARD)).plain for piece in pieces.order]
    inputs = tuple(tensor.to("meta") for tensor in MODELS[name][1])
    whole = capture(model, inputs, target=CUDA, capability=CARD.capability)
    expected = plain_report(whole.plain, roofline(whole, CARD), 0, autograd_nodes=whole.autograd_nodes)
    peak, _ = peak_of(step_of(asked, pieces, 0, [point.shared for point in points]), points)
    assert peak == expected.peak_bytes
    # Sums of the gradients of what several parts use are not counted: on tensors as small as these one is a tenth.
    assert sum(point.seconds for point in points) == pytest.approx(expected.seconds, rel=0.15)


def test_a_custom_function_keeps_its_backward() -> None:
    _, _, pieces = asked_about("repeated")
    last = pieces.kinds[-1].captured.plain
    assert any(call.args[-1:] == (3,) for ways in last.slots for call in ways[0].calls)


FILE = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + torch.tanh(self.down(nn.functional.gelu(self.up(self.norm(x))).square()))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.Sequential(*(Layer() for _ in range(3))), nn.Linear(64, 8)

    def forward(self, x):
        return self.out(self.layers(x))


def pair():
    return Net(), torch.randn(4, 32, 64)


def with_loss(batch=4):
    return Net(), torch.randn(batch, 32, 64), lambda result: result.square().mean()


def closure(batch):
    net, x = Net(), torch.randn(batch, 32, 64)

    def step():
        net(x).square().mean().backward()

    return net, step


def runs():
    net, x = Net(), torch.randn(4, 32, 64)
    optimizer = torch.optim.SGD(net.parameters())
    net(x).square().mean().backward()
    optimizer.step()


def nothing():
    return 3


def asks():
    net, x = Net(), torch.randn(4, 32, 64)
    if net(x).sum().item() > 0:
        net(x).sum().backward()


def fails():
    raise KeyError("where")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("function", "sizes"),
    [("pair", {"batch": 4}), ("with_loss", {"batch": 4}), ("closure", {"batch": 1}), ("runs", {})],
)
def test_functions_make_the_same_step(function: str, sizes: dict[str, int], file: Path) -> None:
    asked = read_question(f"{file}:{function}", optimizer="none")
    assert asked.steps.sizes == sizes and asked.dtype is None
    assert sum(p.numel() for p in asked.model.parameters()) == 3 * (2 * 64 * 256 + 256 + 3 * 64) + 65 * 8
    recording = asked.steps.recorded(4, 0)
    names = [getattr(call.function, "name", getattr(call.function, "__name__", "")) for call in recording.calls]
    layer = ["layer_norm", "linear", "gelu", "square", "linear", "tanh", "add"]
    assert names == [*layer * 3, "linear", *([] if function == "pair" else ["square", "mean"])]
    assert recording.tensors[recording.calls[0].reads[0]].shape == (4, 32, 64)


def test_a_function_may_convert_its_model(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "def make_step(batch=2):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))\n"
        "    first = model[0].weight\n"
        "    model.requires_grad_(False).to('cuda', torch.bfloat16).to('cpu')\n"
        "    assert first is model[0].weight and first.device.type == 'cpu' and not first.requires_grad\n"
        "    model[0].requires_grad_(True)\n"
        "    return model, torch.randn(batch, 8, dtype=torch.bfloat16)\n"
    )
    asked = read_question(f"{path}:make_step")
    assert {p.dtype for p in asked.model.parameters()} == {torch.bfloat16}
    recording = asked.steps.recorded(2, 0)
    assert [recording.tensors[end].dtype for end in recording.ends] == [torch.bfloat16]
    assert len(recording.frozen_weights) == 2


@pytest.mark.slow(rare=["wan-40"])
@pytest.mark.parametrize(("function", "layers"), [("flux", 57), ("wan", 40)])
def test_lora_of_published_diffusion_models(function: str, layers: int) -> None:
    """Each of them in pieces, as the table of cards has them."""
    pytest.importorskip("diffusers")
    path = Path(__file__).parents[3] / "examples" / "diffusion_steps.py"
    asked = read_question(f"{path}:{function}")
    recording = asked.steps.recorded(1, 2 * 1560)
    starts = [name for _, name in _bounds(recording) if "transformer_blocks." in name or name.startswith("blocks.")]
    assert len([name for name in starts if not name.startswith("what is")]) == layers
    assert all(p.dtype is torch.bfloat16 for p in asked.model.parameters() if not p.requires_grad)


def test_functions_that_make_no_step(file: Path) -> None:
    with pytest.raises(UsageError, match=r"neither runs a training step .* nor returns a model, \(model, inputs\)"):
        named(f"{file}:nothing", None, None)
    with pytest.raises(UsageError, match=r"fails' failed: KeyError: 'where'"):
        named(f"{file}:fails", None, None)
    with pytest.raises(UsageError, match=r"asks' failed: DataDependentOutputException"):
        named(f"{file}:asks", None, None)
    with pytest.raises(UsageError, match=r"has no batch that could be another; give a function that takes batch"):
        fits(f"{file}:runs", batch=8, cards=["a100"])


def test_a_function_that_runs_its_step_takes_no_adapters(file: Path) -> None:
    for wrong in ({"lora": 4}, {"dtype": "bfloat16"}):
        with pytest.raises(UsageError, match="runs its step with a model of its own, which gets no adapters"):
            read_question(f"{file}:runs", **wrong)  # type: ignore[arg-type]
    asked = read_question(f"{file}:closure", dtype="bfloat16")
    assert asked.dtype is torch.bfloat16 and {p.dtype for p in asked.model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_step_is_planned_and_its_largest_batch_found(file: Path) -> None:
    found = fits(f"{file}:pair", cards=["a100"], reserve="39.9 GB", optimizer="sgd")
    plain, again, ours = (found.row("a100", way) for way in ("plain", "checkpoint", "ours"))
    assert found.title.endswith("pair, all parameters trained, sgd; batch 4")
    assert ours.fits and ours.peak_bytes <= plain.peak_bytes and 0 < (plain.largest or 0) < (again.largest or 0)
    alone = fits(f"{file}:runs", cards=["a100"], reserve="39.9 GB", optimizer="sgd")
    assert alone.largest == "" and alone.title.endswith("runs, all parameters trained, sgd")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_step_that_checkpoints_itself_is_refused(reentrant: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss(result: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = torch.utils.checkpoint.checkpoint(torch.sin, result, use_reentrant=reentrant)
        return again.sum()

    with pytest.raises(CaptureError, match=r"checkpoints parts of itself.*model\.gradient_checkpointing_disable\(\)"):
        fits(model, torch.zeros(2, 4), loss=loss, cards=["a100"])


def test_a_step_that_computes_gradients_by_itself_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"the step calls torch\.autograd\.grad"):
        fits(model, torch.zeros(2, 4), loss=lambda result: torch.autograd.grad(result.sum(), [model.weight])[0].sum())
