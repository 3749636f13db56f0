"""Steps on a GPU that are replayed as CUDA graphs: the same bits as without, also where a trial decides.

Skipped without a GPU.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torchvision

import monet_like
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.job.job import Job
from monet_like.profile.devices import DEVICES
from monet_like.replay.graphs.model import WARM_UP

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def images(seed: int) -> torch.Tensor:
    return torch.randn(8, 3, 128, 128, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("asked", [True, None])
@torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # it has no atomic additions
def test_results_gradients_and_masks_are_the_same(asked: bool | None) -> None:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(128, 16, 3, 4, 128, 512, dropout=0.1).cuda()
    request = Request(model, ((images(0),), {}), "inplace_multiway_newnode", strategy="store_all")
    device = torch.device("cuda", torch.cuda.current_device())
    record = Job(request, device, Given(DEVICES["a100"])).plan("100%").record
    record = dataclasses.replace(record, budget_bytes=2**40)
    usual, graphed = (monet_like.ScheduleWrapper(copy.deepcopy(model), record, cuda_graphs=on) for on in (False, asked))
    nets = {net: torch.optim.SGD(net.parameters(), 0.01) for net in (usual, graphed)}
    kept: list[list[torch.Tensor]] = [[], []]
    for number in range(WARM_UP + 6):
        for net, found in zip(nets, kept, strict=True):
            torch.manual_seed(number)
            result = net(images(number))
            result.square().mean().backward()
            found += [result.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
            nets[net].step()
            nets[net].zero_grad(set_to_none=number % 2 == 0)
    for place, (mine, theirs) in enumerate(zip(*kept, strict=True)):
        assert torch.equal(mine, theirs), place
    graphs = graphed._graphs
    assert graphs is not None
    won = asked or not graphs.why_not.startswith("a step takes ")  # as many bits, and not in less time
    assert (graphs.captures, graphs.replayed) == (1, 6 * won), graphs.why_not
