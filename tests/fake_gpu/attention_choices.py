"""The kinds of attention that PyTorch takes on the fake GPU, by card.

``python attention_choices.py 80 90`` prints, for each capability, a line of JSON with PyTorch's choice for each of
`CASES`.
"""

from __future__ import annotations

import json
import os
import sys

import torch

#: Dtype, heads of queries, heads of keys and values, their lengths, width of a head, causal, with a mask.
Case = tuple[str, int, int, int, int, int, bool, bool]
CASES: list[Case] = [
    (dtype, heads, groups, length, keys, width, causal, mask)
    for dtype in ("float32", "float16", "bfloat16")
    for heads, groups in ((4, 4), (4, 2))
    for length, keys in ((32, 32), (32, 48))
    for width in (6, 12, 16, 64, 136, 200, 264)
    for causal, mask in ((False, False), (True, False), (False, True))
]


def tensors(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Query, key, value and mask of a case."""
    dtype, heads, groups, length, keys, width, _, mask = case
    shapes = ((2, heads, length, width), (2, groups, keys, width), (2, groups, keys, width))
    kind = getattr(torch, dtype)
    q, k, v = (torch.empty(shape, dtype=kind, device=device).requires_grad_() for shape in shapes)
    return q, k, v, torch.empty(length, keys, dtype=kind, device=device) if mask else None


def choices() -> list[int]:
    """PyTorch's choice for each case."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    found = []
    for case in CASES:
        q, k, v, mask = tensors(case, "cuda")
        with torch.enable_grad():
            found.append(torch._fused_sdp_choice(q, k, v, mask, 0.0, case[6], enable_gqa=case[1] != case[2]))
    return found


if __name__ == "__main__":
    for capability in sys.argv[1:]:  # a process for each, since the stub and PyTorch read it once
        if not os.fork():
            os.environ["FAKE_GPU_CAPABILITY"] = capability
            print(json.dumps(choices()), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0, capability
