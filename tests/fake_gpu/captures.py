"""Models captured for a GPU: on it where there is one, and else as where it is absent.

``python captures.py CASE...`` prints a line of JSON for each case of `CASES`: the program's fingerprint, or why there
is none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.resnet import BasicBlock

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError
from monet_like.models.unet import UNet
from monet_like.variants import admitted

CUDA = torch.device("cuda", 0)
MODE = "inplace_conv_multiway_newnode"
HERE = torch.cuda.is_available()
Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Decoder(nn.Module):
    """Causal attention between RMS norms, gated layers, a float32 head: what autocast casts in several ways."""

    def __init__(self, width: int = 64, heads: int = 4, tokens: int = 256) -> None:
        super().__init__()
        self.heads, self.embedding, self.norm = heads, nn.Embedding(tokens, width), nn.RMSNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        parts = self.attention(self.norm(x)).chunk(3, -1)
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.joined(
            nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2)
        )
        gate, up = self.gate(x).chunk(2, -1)
        x = self.norm(x + self.down(nn.functional.silu(gate) * up))
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())


class Grouped(nn.Module):
    """Causal attention with fewer heads of keys and values than of queries."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, width // heads
        self.queries, self.joined = nn.Linear(width, width), nn.Linear(width, width)
        self.keys, self.values = (nn.Linear(width, groups * self.width) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = self.queries(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        k, v = (m(x).unflatten(-1, (self.groups, self.width)).transpose(1, 2) for m in (self.keys, self.values))
        attend = nn.functional.scaled_dot_product_attention
        attended = attend(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.joined(attended.transpose(1, 2).flatten(-2)).square().mean()


class WrittenOut(nn.Module):
    """Attention by matrix products, regions of autocast, and operators that CPUs' autocast casts otherwise."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(width, width), nn.Linear(width, width)
        self.conv, self.norm, self.head = (
            nn.Conv1d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.Linear(width, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.queries(x) @ self.keys(x).transpose(1, 2)).softmax(-1)
        x = torch.cat([scores @ x, x * 2], 1)
        x = self.norm(self.conv(x.transpose(1, 2))).exp().cumsum(-1) + x.transpose(1, 2).pow(2)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.head(x.transpose(1, 2)).norm(dim=-1) + nn.functional.layer_norm(x, x.shape[-1:]).sum(1)
        with torch.autocast("cuda", enabled=False):
            z = self.head(x.float().transpose(1, 2))
        return nn.functional.smooth_l1_loss(y, z.mean(-1)) + torch.logsumexp(z, -1).mean()


def image(model: nn.Module, size: int = 64, batch: int = 4) -> Made:
    return model, (torch.randn(batch, 3, size, size),)


def _resnet() -> Made:
    """One block as wide as its input, and one with a stride and a shortcut of its own."""
    model = torchvision.models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 10)
    return image(model)


def _efficientnet() -> Made:
    """A block without expansion, one with a stride and one with a residual."""
    blocks = [MBConvConfig(1, 3, 1, 32, 16, 1), MBConvConfig(6, 5, 2, 16, 24, 2)]
    return image(torchvision.models.EfficientNet(blocks, 0.2, last_channel=96, num_classes=10))


class Product(torch.autograd.Function):
    """A product in float32, whatever autocast is active with."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Shuffled(nn.Module):
    """A pixel shuffle, whose result lies otherwise on a GPU, and a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.randn(512, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(nn.functional.pixel_shuffle(self.conv(x), 2).flatten(1), self.weight)


class BinaryLoss(nn.Module):
    """A loss that a GPU's autocast refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(self.layer(x).sigmoid(), x)


class BatchNorms(nn.Module):
    """Batch norms that cuDNN computes and others that ATen does: by extents, parameters, statistics and mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)
        self.images = nn.Sequential(
            nn.BatchNorm2d(8),
            nn.BatchNorm2d(8, affine=False),
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.InstanceNorm2d(8, affine=True),
            nn.InstanceNorm2d(8),
        )
        self.frozen, self.rows, self.columns = nn.BatchNorm2d(8).eval(), nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.images(self.conv(x))).flatten(2)
        y = self.columns(self.linear(x.transpose(1, 2)).transpose(1, 2))  # a copy where cuDNN is to read it
        return self.rows(y.mean(-1)).square().sum()


class Flexible(nn.Module):
    """Attention that compiles itself."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Linear(64, 3 * 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended: Any = flex_attention(*self.joined(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4))
        return attended.square().mean()


def _norms() -> nn.Module:
    layers = nn.Linear(32, 32), nn.RMSNorm(32, elementwise_affine=False), nn.Linear(32, 8), nn.RMSNorm((6, 8))
    return nn.Sequential(nn.RMSNorm(32), *layers)


def _vit() -> nn.Module:
    return torchvision.models.VisionTransformer(64, 16, 1, 4, 64, 128, num_classes=10, dropout=0.1)


def words() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 256, (4, 32)),)


#: Models and their inputs, by name.
NETS: dict[str, Callable[[], Made]] = {
    "batch norms": lambda: image(BatchNorms(), size=8),
    "resnet": _resnet,
    "efficientnet": _efficientnet,
    "unet": lambda: image(UNet(width=8, depth=1)),
    "vit": lambda: image(_vit()),
    "shuffled": lambda: image(Shuffled(), size=8),
    "decoder": lambda: (Decoder(), words()),
    "decoder of narrow heads": lambda: (Decoder(width=24), words()),  # of six elements
    "decoder of padded heads": lambda: (Decoder(width=48), words()),  # of twelve
    "norms": lambda: (_norms(), (torch.randn(4, 6, 32),)),
    "grouped": lambda: (Grouped(), (torch.randn(2, 32, 64),)),
    "masked": lambda: (Grouped(), (torch.randn(2, 32, 64), torch.ones(32, 32, dtype=torch.bool).tril())),
    "written out": lambda: (WrittenOut(), (torch.randn(2, 8, 32),)),
    "binary loss": lambda: (BinaryLoss(), (torch.rand(4, 8),)),
    "flexible": lambda: (Flexible(), (torch.randn(2, 32, 64),)),
}
#: Behind a model's name: its layout, the dtype of its parameters, and autocast, to bfloat16 unless it says float16.
WORDS = ("channels_last", "autocast", "float16", "bfloat16")
CASES = [
    "batch norms", "batch norms channels_last", "batch norms bfloat16", "batch norms channels_last autocast float16",
    "resnet", "resnet channels_last autocast", "efficientnet channels_last autocast", "unet autocast",
    "unet channels_last bfloat16", "vit autocast", "shuffled channels_last", "shuffled channels_last autocast",
    "decoder of narrow heads", "decoder", "norms autocast", "decoder autocast", "decoder bfloat16",
    "decoder of padded heads bfloat16", "grouped", "grouped bfloat16", "masked", "written out autocast",
    "binary loss autocast", "flexible",
]  # fmt: skip


def captured(name: str) -> Captured:
    """A case with all variants."""
    said = name.split()
    model, inputs = NETS[" ".join(word for word in said if word not in WORDS)]()
    casts, cast = "autocast" in said, torch.float16 if "float16" in said else torch.bfloat16
    if "bfloat16" in said:
        model.to(torch.bfloat16)
        inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
    if "channels_last" in said:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = tuple(x.to(memory_format=torch.channels_last) for x in inputs)
    if HERE:
        model, inputs = model.to(CUDA), tuple(x.to(CUDA) for x in inputs)
    with torch.autocast("cuda" if HERE else "cpu", cast, enabled=casts):
        if HERE:
            return admitted(capture(model, inputs), MODE)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as it is on the fake GPU
        try:
            return admitted(capture(model, inputs, target=CUDA, capability=(9, 0)), MODE)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)


def told(name: str) -> dict[str, Any]:
    """The fingerprint of a case and of plain PyTorch's program, and its layouts; or why it cannot be captured."""
    try:
        of = captured(name)
    except CaptureError as error:
        return {"refused": str(error)}
    specs = [value.spec for value in of.program.values]
    return {"fingerprint": of.program.fingerprint, "plain": of.plain.fingerprint, "values": specs}


if __name__ == "__main__":
    torch.backends.cudnn.enabled = True  # as it is for captures, see `build`
    if HERE:  # what cuDNN itself is asked for then
        torch._C._get_cudnn_batch_norm_reserve_space_size = lambda x, training: 0
    for case in sys.argv[1:] or CASES:
        print(json.dumps(told(case)))
