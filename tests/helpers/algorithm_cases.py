"""Programs whose convolutions may take cuDNN's algorithms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monet_like.capture.captured import Captured, fake_mode
from monet_like.capture.lower.step import capture
from monet_like.variants import admitted

EXACT = "inplace_conv_multiway_newnode"
MODE = f"{EXACT}_algorithms"
FORMATS = (torch.contiguous_format, torch.channels_last)


def captured(
    model: nn.Module,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    layout: Any = FORMATS[0],
    mode: str = MODE,
    grad: bool = False,
) -> Captured:
    """As on a GPU; ``grad``: with the input's gradient."""
    with fake_mode():
        x = torch.empty(shape, dtype=dtype).to(memory_format=layout).requires_grad_(grad)
    return admitted(capture(model.to(dtype).to(memory_format=layout), (x,), target=torch.device("cuda", 0)), mode)


class Attends(nn.Module):
    """Attention by a kind that is told, of what one linear layer makes."""

    def __init__(self, kind: str = "", causal: bool = False, width: int = 8, **options: Any) -> None:
        super().__init__()
        self.kind, self.causal, self.options = kind, causal, options
        self.first, self.last = nn.Linear(16, 3 * 4 * width), nn.Linear(4 * width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.kind:
            op = getattr(torch.ops.aten, f"_scaled_dot_product_{self.kind}_attention")
            given = (0.0,) if self.kind == "flash" else (None, True, 0.0)
            y = op(q, k, v, *given, self.causal, **self.options)[0]
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, **self.options)
        return self.last(y.transpose(1, 2).flatten(2))
