"""Models whose activations may be copied to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from monet_like.capture.captured import Captured
from monet_like.ir.schedule import Schedule

Made = tuple[nn.Module, tuple[Tensor, ...]]


def layers(count: int = 8, width: int = 512, batch: int = 1024) -> Made:
    """Products that take long for what they make."""
    stack = (layer for _ in range(count) for layer in (nn.Linear(width, width), nn.GELU()))
    return nn.Sequential(*stack), (torch.randn(batch, width),)


def convolutions(layout: torch.memory_format) -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)
    )
    return model.to(memory_format=layout), (torch.randn(4, 3, 20, 20, requires_grad=True).to(memory_format=layout),)


class Tokens(nn.Module):
    """Indices, dropout's noise, a transposed product."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop, self.out = nn.Embedding(50, 64), nn.Dropout(0.3), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(nn.functional.silu(self.table(x * 2 % 50)))
        return torch.softmax(self.out(hidden) @ hidden.transpose(1, 2), dim=-1)


class Gated(nn.Module):
    """Layers with gates that gradients read, and whose making takes sixteen times their memory.

    Once most gradients of parameters are there, no gate can be made again in the memory in which it was made first.
    """

    def __init__(self, count: int = 12, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C] to the same."""
        steps, given = torch.arange(1.0, 17.0), x.detach()
        for number, layer in enumerate(self.layers):
            gate = torch.sin((given * (number + 1)).unsqueeze(-1) * steps).sum(-1)
            x = layer(x) * gate
        return x


MODELS: dict[str, Callable[[], Made]] = {
    "layers": lambda: layers(4, 64, 64),
    "channels_last": lambda: convolutions(torch.channels_last),
    "default_layout": lambda: convolutions(torch.contiguous_format),
    "bfloat16": lambda: (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16(), (torch.randn(64,
    64).bfloat16(),)),
    "tokens": lambda: (Tokens(), (torch.randint(0, 50, (8, 16)),)),
}  # fmt: skip


def taken(captured: Captured, schedule: Schedule) -> list[str]:
    tasks = captured.program.tasks
    return [tasks[p].copies for p in (*schedule.forward, *(p for again in schedule.again for p in again))]
