"""One training step of a four-layer net through every stage, from the module to the replay: python examples/walk.py"""

from __future__ import annotations

import copy

import torch
from torch import nn

from monet_like import ScheduleWrapper
from monet_like.capture.lower.step import capture
from monet_like.compiler.pipeline import make_record, plan_for, prepare
from monet_like.compiler.request import Request
from monet_like.profile.devices import DEVICES
from monet_like.variants import admitted

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3))
images = torch.randn(16, 3, 64, 64)
mode = "inplace_multiway_newnode"

# Capture: the module becomes a program of values, forward tasks and backward slots.
captured = capture(model, (images,))
print("capture ", captured.program)

# Variants: the operator variants that the mode admits become further tasks, and further ways of slots.
captured = admitted(captured, mode)
print("variants", captured.program)

# Profile: seconds and workspace of every task; here estimated from the rates of an A100's data sheet.
request = Request(model, ((images,), {}), mode, expression="four layers", solver="HIGHS")
ready = prepare(request, torch.device("cpu"), profile=DEVICES["a100"], captured=captured)
print("profile ", ready.profile)
print("plain   ", ready.plain)

# Plan: the fastest schedule within 75 % of plain PyTorch's peak memory. The simulator has judged it: its report.
budget_bytes = int(0.75 * ready.plain.peak_bytes)
found = plan_for(ready, request, budget_bytes)
print("plan    ", found)
print("report  ", found.report)
print("schedule", found.schedule)

# Schedule file: what replay needs, and what the schedule promises. `record.save(path)` writes it.
record = make_record(request, ready, found, budget_bytes)
print("record  ", record)

# Replay: a training step by the schedule leaves the gradients of plain PyTorch's.
plain, scheduled = model, ScheduleWrapper(copy.deepcopy(model), record)
for net in (plain, scheduled):
    net(images).square().mean().backward()
equal = [torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), scheduled.parameters(), strict=True)]
print("replay  ", f"{sum(equal)} of {len(equal)} gradients equal plain PyTorch's bit by bit")
