"""Steps of models in blocks, rehearsed on fake tensors or on real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from block_models import CPU, Decoder, loss_of, tokens
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.auto.blocks import plan_no_more
from monet_like.auto.rehearsal.memory import Blocks, Rehearsed, StepMemory, step_of


class Skips(nn.Module):
    """Gradients are summed over skip connections, normalisations have workspaces, and random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.drop, self.end = nn.Dropout(0.3), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        wide = self.layers[0](x)
        narrow = self.layers[1](F.max_pool2d(wide, 2))
        narrow = self.layers[2](narrow) + narrow * F.softmax(narrow, 1)
        up = self.drop(F.interpolate(narrow, scale_factor=2, mode="bilinear"))
        return self.end(F.gelu(torch.cat([up, wide + x], 1))).std(dim=1)


class Tied(Decoder):
    """One weight at both ends, a mean of all blocks' results, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.places, self.batch_norm = nn.Parameter(torch.zeros(1, 32, 32)), nn.BatchNorm1d(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places
        x = x * torch.sigmoid(x) + x.mean(1, keepdim=True)
        results = []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        x = self.normalised(sum(results) / len(results))
        return self.head(self.norm(torch.where(x > 0, x, x.exp()))).logsumexp(-1)

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(x.transpose(1, 2).contiguous()).transpose(1, 2)


class Cast(Tied):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return super().forward(tokens)


class Transposed(Tied):
    """The gradient of batch norm lies otherwise than PyTorch's fake tensors say."""

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class Indexed(Decoder):
    """The gradient of an index fills zeros in place."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)[:, torch.arange(32, device=x.device)] + x.topk(32, -1).values * 2
        return self.head(x)


class Checkpoints(Decoder):
    """A checkpoint keeps the state of the random generator."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wide = torch.utils.checkpoint.checkpoint(lambda x: x.sin().exp(), self.embedding(tokens), use_reentrant=False)
        return self.head(self.layers[0](wide))


class Asks(Decoder):
    """The rest of the model asks for values of literals and of its input, which it changes before."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        tokens[:, 1:].clamp_(min=2)
        if (places.diff(dim=1) != 1).any() or (tokens[:, -1] < 2).any():
            tokens = torch.cat([tokens, tokens])
        return super().forward(tokens)


class AsksOfActivations(Decoder):
    """The rest of the model asks for a value that depends on weights."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result = super().forward(tokens)
        return result + 0 if result.isnan().any() else result


class Shares(Decoder):
    """NumPy changes a buffer in place, which no operator shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.numpy()[0] += 1
        return super().forward(tokens)


def entropy(result: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(result.flatten(0, 1), tokens().flatten().to(result.device), label_smoothing=0.1)


def add_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


TOKENS, IMAGES = tokens(), torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


@dataclass(frozen=True)
class Rehearsal:
    """A step to rehearse.

    Attributes:
        make: the model.
        loss: of its result; None: the result's own.
        before: called with the model before the step.
        on_fakes: fake tensors tell what it takes.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any], torch.Tensor] | None = loss_of
    x: torch.Tensor = TOKENS
    before: Callable[[nn.Module], None] = lambda _: None
    on_fakes: bool = True

    def rehearsed(self, *, fake: bool, device: torch.device = CPU) -> tuple[list[Rehearsed], bool]:
        """Two rehearsals, in which blocks keep all and nothing, and whether they were on fake tensors."""
        torch.manual_seed(0)
        model = self.make().to(device)
        monet_like.auto_schedule(model, blocks="layers.*", mode="inplace_multiway_newnode")
        plan_no_more(model)
        self.before(model)
        blocks = tuple(blocks_of(model))
        step = step_of(model, ((self.x.to(device),), {}), self.loss)
        memory = StepMemory(Blocks(model, blocks), step, "none", "alone")
        if not fake:
            memory._leave_fakes()
        memory.rehearsed(None)  # captures, which may take memory of their own
        found = [memory.rehearsed(kept) for kept in (None, [()] * len(blocks))]
        memory.close()
        return found, memory._fakes is not None


REHEARSALS = {
    "skips": Rehearsal(Skips, None, IMAGES),
    "entropy": Rehearsal(Decoder, entropy),
    "tied": Rehearsal(Tied),
    "gradients that are added to": Rehearsal(Tied, before=add_gradients),
    "transposed": Rehearsal(Transposed),
    "autocast": Rehearsal(Cast),
    "indexed": Rehearsal(Indexed),
    "checkpoints": Rehearsal(Checkpoints),
    "asks": Rehearsal(Asks),
    "asks of activations": Rehearsal(AsksOfActivations, on_fakes=False),
    "shares memory": Rehearsal(Shares, on_fakes=False),
}
