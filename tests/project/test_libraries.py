"""Loops of libraries as their users write them: three steps of an optimizer, equal to plain PyTorch's to the bit, or
refused in words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
import torch.utils._pytree as pytree
from any_schedule import AnySchedule, assert_as_plain
from torch import nn
from torch.nn.functional import cross_entropy

from monet_like import auto_schedule
from monet_like.auto.block import blocks_of
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError

pytestmark = pytest.mark.slow


def trains(make: Callable[[], nn.Module], loss: Callable[[nn.Module, int], torch.Tensor], captures: int = 1) -> None:
    """Assert that three steps of Adam are plain PyTorch's."""

    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for number in range(3):
            optimizer.zero_grad()
            value = loss(called, number)
            value.backward()
            optimizer.step()
            note(value)

    assert_as_plain(make, script, captures)


# PyTorch Geometric ---------------------------------------------------------------------------------------------------


def graph(seed: int, nodes: int = 12) -> Any:
    data = pytest.importorskip("torch_geometric.data")
    draw = torch.Generator().manual_seed(seed)
    return data.Data(
        x=torch.randn(nodes, 8, generator=draw),
        edge_index=torch.randint(nodes, (2, 40), generator=draw),
        y=torch.randint(3, (nodes,), generator=draw),
    )


def convolutions(name: str, **options: Any) -> nn.Module:
    layers = pytest.importorskip("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = getattr(layers, name)
            self.first, self.second = kind(8, 16, **options), kind(16, 3, **options)

        def forward(self, data: Any) -> torch.Tensor:
            return self.second(self.first(data.x, data.edge_index).relu(), data.edge_index)

    return Net()


@pytest.mark.parametrize(
    ("name", "options"),
    [("GCNConv", {"add_self_loops": False}), ("GCNConv", {"normalize": False}), ("SAGEConv", {}), ("GraphConv", {})],
)
def test_convolutions_of_graphs(name: str, options: dict[str, Any]) -> None:
    trains(lambda: convolutions(name, **options), lambda net, k: cross_entropy(net(graph(k)), graph(k).y))


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "GATv2Conv", "ChebConv"])
def test_self_loops_are_replaced(name: str) -> None:
    """Their number is the size of a tensor: one capture for a graph, another for a graph with more of them."""
    first, other = graph(0), graph(0)
    other.edge_index = other.edge_index.clone()
    other.edge_index[:, :3] = torch.tensor([[1, 2, 3], [1, 2, 3]])
    options = {"K": 2} if name == "ChebConv" else {}
    graphs = [first, other, first]
    trains(lambda: convolutions(name, **options), lambda net, k: cross_entropy(net(graphs[k]), graphs[k].y), captures=2)


def test_batches_of_graphs() -> None:
    data, layers = pytest.importorskip("torch_geometric.data"), pytest.importorskip("torch_geometric.nn")

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.head = layers.SAGEConv(8, 16), layers.GraphNorm(16), nn.Linear(16, 2)

        def forward(self, batch: Any) -> torch.Tensor:
            x = self.norm(self.layer(batch.x, batch.edge_index).relu(), batch.batch)
            return self.head(layers.global_mean_pool(x, batch.batch))

    trains(
        Pooled, lambda net, k: net(data.Batch.from_data_list([graph(k), graph(k + 3), graph(k + 6)])).square().mean()
    )


# Quantisation-aware training ------------------------------------------------------------------------------------------


def quantised(version: int) -> nn.Module:
    """PyTorch's own: observers and fake quantisation in one operator, or in two modules, whose weights have a scale for
    each channel."""
    found = nn.Sequential(
        quantization.QuantStub(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).train()
    found.qconfig = quantization.get_default_qat_qconfig("fbgemm", version=version)
    found = quantization.fuse_modules_qat(found, [["1", "2", "3"]])
    return quantization.prepare_qat(found)


@pytest.mark.parametrize("version", [0, 1])
def test_fake_quantisation(version: int) -> None:
    """From the second call on observers are off."""

    def made() -> nn.Module:
        model = quantised(version)
        model(torch.randn(2, 3, 6, 6))  # observers give their buffers a size
        return model

    def loss(net: nn.Module, number: int) -> torch.Tensor:
        if number == 2:
            net.apply(quantization.disable_observer)
        return net(torch.randn(2, 3, 6, 6)).square().mean()

    trains(made, loss, captures=2 - version)


def test_observers_that_have_seen_nothing_are_refused_with_what_to_do() -> None:
    with pytest.raises(CaptureError, match=r"it resizes a tensor, as observers .*call the model once before"):
        capture(quantised(0), (torch.randn(2, 3, 6, 6),))


# Speech --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_labels_of_speech_are_selected(padded: bool) -> None:
    """Wav2vec 2.0's CTC loss selects labels by a mask, and has their counts in tensors."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(16,
        16),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0, ctc_loss_reduction="mean",
    )  # fmt: skip

    def loss(net: nn.Module, k: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(k)
        sound, labels = torch.randn(2, 800, generator=draw), torch.randint(1, 12, (2, 6), generator=draw)
        labels[1, 4 + k % 2 :] = -100
        mask = torch.ones(2, 800, dtype=torch.long)
        mask[1, 600:] = 0
        found: torch.Tensor = net(sound, attention_mask=mask if padded else None, labels=labels).loss
        return found

    trains(lambda: transformers.Wav2Vec2ForCTC(config), loss, captures=2)


# Differential equations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "captures"), [("euler", 1), ("rk4", 1), ("dopri5", None)])
def test_neural_differential_equations(method: str, captures: int | None) -> None:
    torchdiffeq = pytest.importorskip("torchdiffeq")

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            times, loose = torch.linspace(0, 1, 3), {"rtol": 1e-2, "atol": 1e-3}  # a few steps
            return torchdiffeq.odeint(lambda t, y: self.field(y), y, times, method=method, **loose)

    trains(Flow, lambda net, k: net(torch.randn(5, 3)).square().mean(), captures)


def test_an_adjoint_that_looks_at_values_is_refused() -> None:
    torchdiffeq = pytest.importorskip("torchdiffeq")

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layer(y).tanh()

    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Field()

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return torchdiffeq.odeint_adjoint(self.field, y, torch.linspace(0, 1, 4), method="rk4")

    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        AnySchedule(Solved())(torch.randn(5, 3))


# Layers that set what a schedule cannot set
# ----------------------------------------------------------------------------


def spiking() -> nn.Module:
    snntorch = pytest.importorskip("snntorch")

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
            self.spikes = snntorch.Leaky(beta=0.9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, found = self.spikes.init_leaky(), []
            for _ in range(4):
                spike, state = self.spikes(self.first(x), state)
                found.append(self.second(spike))
            return torch.stack(found).sum(0)

    return Spiking()


def private() -> nn.Module:
    """Adapted as `opacus.PrivacyEngine` does it: gradients of each sample at the parameters, but for frozen layers."""
    opacus = pytest.importorskip("opacus")
    net = nn.Sequential(nn.Linear(16, 32), nn.Sequential(nn.Linear(32, 32), nn.GELU()), nn.Linear(32, 4))
    net[1].requires_grad_(False)
    adapted: nn.Module = opacus.GradSampleModule(net)
    return adapted


_SPIKES = r"forward assigns spikes\.mem, .* plan the parts that do not assign it: "
_SAMPLES = r"sets self\._module\.\d\.\w+\.\w+ in the backward, .* plan the parts without it: "


@pytest.mark.parametrize(
    ("make", "refused", "parts", "found"),
    [
        (spiking, _SPIKES, ["first", "second"], False),
        (private, _SAMPLES, ["_module.1"], False),
        (private, _SAMPLES, ["_module.1"], True),
    ],
)
def test_the_parts_beside_layers_that_cannot_be_planned_train(
    make: Callable[[], nn.Module], refused: str, parts: list[str], found: bool
) -> None:
    """The advice of the refusal can be followed, and `auto_schedule` itself follows it where parts have several
    operators."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    plain, x = make(), torch.randn(8, 16)
    with pytest.raises(CaptureError, match=refused + r"auto_schedule\(model, blocks=\[\.\.\.\]\)"):
        capture(model, (x,))
    assert not any(
        "grad_sample" in vars(parameter) and parameter.grad_sample is not None for parameter in model.parameters()
    )
    mine = auto_schedule(
        model,
        memory_budget="150%",
        mode="inplace_multiway_newnode",
        effort="quick",
        blocks=None if found else [model.get_submodule(name) for name in parts],
    )
    for number in range(3):
        given, results = torch.randn(8, 16), []
        for net in (plain, mine):
            net.zero_grad()
            torch.manual_seed(number)
            loss = net(given).square().mean()
            loss.backward()
            results.append([loss.detach(), *[(p.grad, getattr(p, "grad_sample", None)) for p in net.parameters()]])
        for ours, theirs in zip(pytree.tree_leaves(results[1]), pytree.tree_leaves(results[0]), strict=True):
            assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours is theirs
    assert [block._block_name for block in blocks_of(mine)] == parts
