"""U-Net (Ronneberger, Fischer, Brox: U-Net, MICCAI 2015, figure 1), with padded convolutions.

Four times down and four times up, 64 to 1024 channels, skips concatenated; padding keeps the sizes equal, so
nothing is cropped. MONeT trains such a net on 416 x 608 images, three channels in, one out.
"""

from __future__ import annotations

import torch
from torch import nn


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A U-Net for images whose sides are multiples of ``2**depth``.

    Args:
        channels: of the image.
        classes: channels of the result, which has the image's height and width.
        width: channels at full resolution; they double at every step down.
        depth: steps down.
    """

    def __init__(self, channels: int = 3, classes: int = 1, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = _twice(channels, widths[0])
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.up = nn.ModuleList(_twice(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``[N, channels, H, W]`` to ``[N, classes, H, W]``."""
        x = self.first(image)
        skips = []
        for level in self.down:
            skips.append(x)
            x = level(self.pool(x))
        for grow, up in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = up(torch.cat((skips.pop(), grow(x)), dim=1))
        result: torch.Tensor = self.last(x)
        return result
