"""A net whose batch norm was captured by cuDNN, on the fake GPU: what a step without cuDNN does. See `build`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from replays import record_for

from monet_like.capture.lower.step import capture
from monet_like.errors import ScheduleFileError
from monet_like.plan import store_all
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.runtime.batch_norm import CUDNN
from monet_like.variants import admitted


def told() -> dict[str, object]:
    """Whether cuDNN's batch norm was captured, what has changed without cuDNN, and what the wrapper says then."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to("cuda").train()
    args: tuple[torch.Tensor, ...] = (torch.randn(2, 3, 8, 8).to("cuda"),)
    torch._C._get_cudnn_batch_norm_reserve_space_size = lambda x, training: 0  # type: ignore[attr-defined]
    with torch.backends.cudnn.flags(enabled=True):
        captured = admitted(capture(model, args), "normal")
        record = record_for(captured, store_all(captured.program), "normal", (model, args, {}))
        record = replace(record, peak_bytes=2**30, device="cuda")
        wrapped = ScheduleWrapper(model, record, example=(args, {}), captured=captured)
    found: dict[str, object] = {
        "by cudnn": any(call.op == CUDNN for task in captured.program.every_task() for call in task.calls)
    }
    for name, step in {
        "next step": lambda: wrapped(*args),
        "new wrapper": lambda: ScheduleWrapper(model, record, example=(args, {}), captured=captured),
    }.items():
        try:
            step()
        except ScheduleFileError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(told()))
