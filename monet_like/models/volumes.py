"""U-Nets for volumes as nnU-Net configures them: 3-D convolutions, instance norm, leaky ReLU, deep supervision.

The plain net follows Isensee, Jaeger, Kohl, Petersen, Maier-Hein: nnU-Net, Nature Methods 18 (2021), the one with a
residual encoder Isensee, Wald, Ulrich et al.: nnU-Net Revisited, MICCAI 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class ConvBlock(nn.Sequential):
    """Convolution 3x3x3, instance norm, leaky ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv3d(inputs, outputs, 3, stride, padding=1),
            nn.InstanceNorm3d(outputs, eps=1e-5, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )


class ResidualBlock(nn.Module):
    """Two convolutions with instance norm around a skip; the skip is pooled and projected where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = ConvBlock(inputs, outputs, stride)
        self.second = nn.Sequential(
            nn.Conv3d(outputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, eps=1e-5, affine=True)
        )
        shortcut: list[nn.Module] = [nn.AvgPool3d(stride)] if stride != 1 else []
        if inputs != outputs:
            shortcut += [
                nn.Conv3d(inputs, outputs, 1, bias=False),
                nn.InstanceNorm3d(outputs, eps=1e-5, affine=True),
            ]
        self.shortcut = nn.Sequential(*shortcut)
        self.activation = nn.LeakyReLU(0.01, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, inputs, D, H, W]`` to ``[N, outputs, D / stride, H / stride, W / stride]``."""
        result: torch.Tensor = self.activation(self.second(self.first(x)) + self.shortcut(x))
        return result


class VolumeUNet(nn.Module):
    """A U-Net for volumes whose sides are multiples of ``2 ** (len(widths) - 1)``.

    Args:
        channels: of the volume.
        classes: channels of the results.
        widths: channels of every level, from full resolution down; each level halves the sides.
        blocks: blocks of every level of the encoder.
        residual: residual blocks in the encoder, as in the presets of 2024; else convolutions only.
        deep_supervision: in training, results at every resolution but the lowest.
        patch: sides of the volumes that it is trained on, for `make_inputs`.
    """

    def __init__(
        self,
        channels: int = 1,
        classes: int = 3,
        widths: Sequence[int] = (32, 64, 128, 256, 320, 320),
        blocks: Sequence[int] = (1, 3, 4, 6, 6, 6),
        *,
        residual: bool = True,
        deep_supervision: bool = True,
        patch: Sequence[int] = (128, 128, 128),
    ) -> None:
        super().__init__()
        self.channels, self.patch = channels, tuple(patch)
        block = ResidualBlock if residual else ConvBlock
        self.stem = ConvBlock(channels, widths[0])
        levels = []
        for level, (before, width, count) in enumerate(zip((widths[0], *widths), widths, blocks, strict=False)):
            first = block(before, width, 2 if level else 1)
            levels.append(nn.Sequential(first, *(block(width, width) for _ in range(count - 1))))
        self.encoder = nn.ModuleList(levels)
        pairs = list(zip(widths[:-1], widths[1:], strict=True))[::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose3d(below, width, 2, stride=2) for width, below in pairs)
        self.decoder = nn.ModuleList(ConvBlock(2 * width, width) for width, _ in pairs)
        self.heads = nn.ModuleList(nn.Conv3d(width, classes, 1) for width, _ in pairs)
        self.deep_supervision = deep_supervision

    def forward(self, volume: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """``[N, channels, D, H, W]`` to ``[N, classes, D, H, W]``; with deep supervision also at half the sides and so
        on.
        """
        x = self.stem(volume)
        skips = []
        for level in self.encoder:
            x = level(x)
            skips.append(x)
        results: list[torch.Tensor] = []
        supervised = self.training and self.deep_supervision
        x = skips.pop()
        for grow, level, head in zip(self.grow, self.decoder, self.heads, strict=True):
            x = level(torch.cat((grow(x), skips.pop()), dim=1))
            if supervised or not skips:
                results.append(head(x))
        return tuple(reversed(results)) if supervised else results[0]

    def make_inputs(self, batch: int) -> torch.Tensor:
        """A batch of volumes, ``[batch, channels, *patch]``."""
        return torch.randn(batch, self.channels, *self.patch)


def nnunet(side: int = 128) -> VolumeUNet:
    """The plain net, two convolutions at every level: 26 million parameters."""
    return VolumeUNet(blocks=(2,) * 6, residual=False, patch=(side,) * 3)


def nnunet_large(depth: int = 160, height: int = 224, width: int = 192) -> VolumeUNet:
    """The residual encoder of the large presets of 2024, 102 million parameters, at the patch of KiTS by default."""
    return VolumeUNet(patch=(depth, height, width))
