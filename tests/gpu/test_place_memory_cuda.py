"""Steps on a GPU whose tensors are placed ahead: the same bits, and no more memory than the block.

Skipped without a GPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision

import monet_like
from monet_like.build import library_path
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.job.job import Job
from monet_like.profile.devices import DEVICES
from monet_like.replay.memory.arena import RECORDED

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not library_path("arena_cuda").exists():
    pytest.skip("the library that places memory is not compiled", allow_module_level=True)


def images(seed: int) -> torch.Tensor:
    return torch.randn(8, 3, 128, 128, generator=torch.Generator().manual_seed(seed)).cuda()


@torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # it has no atomic additions
def test_the_bits_are_the_same_on_every_stream() -> None:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(128, 16, 3, 4, 128, 512, dropout=0.1).cuda()
    request = Request(model, ((images(0),), {}), "inplace_multiway_newnode", strategy="heuristic")
    device = torch.device("cuda", torch.cuda.current_device())
    record = Job(request, device, Given(DEVICES["a100"])).plan("80%").record
    usual, placed = (monet_like.ScheduleWrapper(copy.deepcopy(model), record) for _ in range(2))
    monet_like.place_memory(placed)
    beside = torch.cuda.Stream()
    for number in range(RECORDED + 4):
        found = []
        for net in (usual, placed):
            torch.manual_seed(number)
            net.zero_grad()
            result = net(images(number))
            result.square().mean().backward()
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            with torch.cuda.stream(beside):  # reads after a wait, while the next step may write
                beside.wait_stream(torch.cuda.current_stream())
                torch.cuda._sleep(10_000_000)
                found.append([result.detach().clone(), *(g.clone() for g in gradients)])
            for tensor in (result, *gradients):
                tensor.record_stream(beside)
            del result, gradients
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), number
    (memory,) = (each.step.memory for each in placed._kept)
    assert memory is not None
    assert memory.counts[0] > 10
