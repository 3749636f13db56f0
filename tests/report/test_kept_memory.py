"""What `monet_like.memory_report` says is kept: against the tensors that the autograd graph of a real step holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monet_like
from monet_like.errors import UsageError
from monet_like.report.kept_memory import KeptModule, MemoryReport, _folded

MODE = "inplace_multiway_newnode"


class Block(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(width, width), nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def held_bytes(model: nn.Module, result: torch.Tensor, inputs: torch.Tensor) -> int:
    """Bytes of the storages that the graph of a result holds, without those of parameters and inputs."""
    others = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), inputs)}
    held: dict[int, int] = {}
    nodes, seen = [result.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [above for above, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in others:
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def test_a_whole_model_keeps_what_its_graph_holds() -> None:
    model, x = Net().train(), torch.randn(64, 32)
    wrapped = monet_like.auto_schedule(model, x, memory_budget="80%", mode=MODE, effort="quick")
    result = wrapped(x)
    report = monet_like.memory_report(wrapped)
    assert report.bytes == held_bytes(model, result, x) > 0
    assert report.bytes == sum(m.bytes for m in report.modules) == int(report.to_frame()["bytes"].sum())
    assert all(m.bytes == m.count * m.each_bytes for m in report.modules)


def test_equal_blocks_are_one_row() -> None:
    model, x = Net().train(), torch.randn(64, 32)
    monet_like.auto_schedule(model, memory_budget="100%", mode=MODE, effort="quick", blocks="layers.*")
    model(x).backward()
    report = monet_like.memory_report(model)
    acts = [m for m in report.modules if m.module.endswith(".up")]
    assert [(m.module, m.count, m.tensors) for m in acts] == [("layers.0-5.up", 6, ("float32[64, 128]",))]
    assert "layers.0-5.up" in str(report) and " x6 " in str(report)
    assert str(report).startswith("budget ")


def test_names_are_folded_by_one_number() -> None:
    found = [(f"stage1.{i}.conv2", ("float32[4]",), 16) for i in (0, 1, 2, 4)]
    found += [("stage2.0.conv2", ("float32[4]",), 16), ("stage1.3.conv2", ("float32[8]",), 32)]
    assert [(m.module, m.count, m.bytes) for m in _folded(found)] == [
        ("stage1.0-2,4.conv2", 4, 64),
        ("stage2.0.conv2", 1, 16),
        ("stage1.3.conv2", 1, 32),
    ]


def test_only_the_largest_are_printed() -> None:
    modules = tuple(KeptModule(f"m{i}", 1, (), 8, 8) for i in range(23))
    lines = str(MemoryReport("promise", modules)).splitlines()
    assert len(lines) == 2 + 1 + 20 + 1
    assert lines[-1].split() == ["3", "smaller", "ones", "24", "B"]


def test_without_a_schedule_the_error_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="give memory_report the model that auto_schedule returns"):
        monet_like.memory_report(Net())
    with pytest.raises(UsageError, match="call the model once in training mode"):
        monet_like.memory_report(monet_like.auto_schedule(Net(), memory_budget="80%"))
