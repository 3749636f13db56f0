"""One line, `auto_schedule(model, memory_budget=...)`, for a model of each kind: those that are captured whole have
one schedule, the others schedules of parts. All train as plain PyTorch does, to the bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from block_models import EXACT, plan_briefly, plan_of, trained
from processes import together
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import monet_like
from monet_like.errors import InfeasibleError

QUICK: dict[str, Any] = {"mode": EXACT, "effort": "quick", "verbose": False}
#: A model, its batches as keywords of its forward, and the scalar of its result.
Task = tuple[nn.Module, list[dict[str, Any]], Callable[[Any], torch.Tensor]]


def resnet() -> Task:
    import torchvision

    model = torchvision.models.resnet50(num_classes=10)
    return model, [{"x": torch.randn(2, 3, 32, 32)} for _ in range(2)], lambda logits: logits.square().mean()


def tokens() -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, 12))
    return {"input_ids": ids, "labels": ids}


def llama() -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    return model, [tokens() for _ in range(2)], lambda result: result.loss


def mixtral(experts: str) -> Task:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=64, num_hidden_layers=2, num_local_experts=4, experts_implementation=experts, **sizes
    )
    return MixtralForCausalLM(config), [tokens() for _ in range(2)], lambda result: result.loss


def mask_rcnn() -> Task:
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    convolutions = (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(3))
    backbone: Any = nn.Sequential(nn.Conv2d(3, 64, 7, 8, 3), *convolutions)
    backbone.out_channels = 64
    model = MaskRCNN(
        backbone, num_classes=3, min_size=96, max_size=96, rpn_post_nms_top_n_train=50,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),)),
    )  # fmt: skip

    def batch() -> dict[str, Any]:
        targets = []
        for _ in range(2):
            corner = torch.rand(2, 2) * 40
            boxes = torch.cat([corner, corner + 12 + torch.rand(2, 2) * 30], 1)
            masks = (torch.rand(2, 96, 96) > 0.5).to(torch.uint8)
            targets.append({"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks})
        return {"images": [torch.rand(3, 96, 96) for _ in range(2)], "targets": targets}

    return model, [batch() for _ in range(2)], lambda losses: sum(losses.values())  # type: ignore[return-value]


class Pooling(nn.Module):
    """A net of graphs that keeps the nodes with the best learned scores."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GraphConv, SAGPooling, Sequential

        self.encoder = Sequential("x, edges", [(GraphConv(8, 16), "x, edges -> x"), nn.ReLU(), nn.Linear(16, 16)])
        self.pool = SAGPooling(16, 0.5)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        from torch_geometric.nn import global_mean_pool

        x, _, _, graph, *_ = self.pool(self.encoder(x, edges), edges, None, graph)
        result: torch.Tensor = self.head(global_mean_pool(x, graph))
        return result


def graphs() -> Task:
    graph = torch.arange(4).repeat_interleave(10)
    batches = [{"x": torch.randn(40, 8), "edges": torch.randint(0, 40, (2, 120)), "graph": graph} for _ in range(2)]
    return Pooling(), batches, lambda result: result.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (resnet, None),
        (llama, None),
        (lambda: mixtral("grouped_mm"), None),
        (lambda: mixtral("eager"), ["model.layers.0.self_attn", "model.layers.1.self_attn"]),
        (mask_rcnn, ["backbone"]),
        (graphs, ["encoder", "head"]),
    ],
    ids=["resnet", "llama", "moe", "moe with experts in Python", "mask_rcnn", "graphs"],
)
def test_one_line_serves(make: Callable[[], Task], parts: list[str] | None) -> None:
    torch.manual_seed(0)
    plain, batches, scalar = make()
    mine: Any = monet_like.auto_schedule(copy.deepcopy(plain).train(), memory_budget="150%", **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found, expected = trained(mine, batches, scalar), trained(plain.train(), batches, scalar)
    assert all(torch.isfinite(tensor).all() for tensor in expected)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert (mine.record is None) == (parts is not None)
    if parts is not None:
        assert [name for name in mine._parts if name in parts] == parts
        assert plan_of(mine).peak_bytes <= plan_of(mine).budget_bytes
    assert list(mine.state_dict()) == list(plain.state_dict())


def _sharded(rank: int, before: bool) -> None:
    plan_briefly()
    torch.manual_seed(0)
    plain, _, scalar = llama()

    def shard(model: Any) -> Any:
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    mine: Any = copy.deepcopy(plain)
    options = {"memory_budget": "95%", **QUICK}
    mine = (
        monet_like.auto_schedule(shard(mine), **options) if before else shard(monet_like.auto_schedule(mine, **options))
    )
    shard(plain)
    torch.manual_seed(rank)
    batches = [tokens() for _ in range(2)]
    found, expected = [
        [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in trained(model, batches, scalar)]
        for model in (mine, plain)
    ]
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    names = [f"model.layers.{layer}.{part}" for layer in range(2) for part in ("self_attn", "mlp")]
    assert list(mine._parts) == names
    plan = plan_of(mine)
    assert plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_one_line_serves_sharded_models(tmp_path: Path, before: bool) -> None:
    together(tmp_path, _sharded, before, within_seconds=300.0)


class Chosen(nn.Module):
    """Computes with the rows that have the best learned scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.score = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        scores = self.score(x).squeeze(1)
        best = (scores > scores.median()).nonzero().squeeze(1)
        return x[best] * scores[best, None].sigmoid()


def _replicated(rank: int, inside: bool) -> None:
    plan_briefly()
    torch.manual_seed(0)
    plain = Chosen()
    mine: Any = copy.deepcopy(plain)
    options = {"memory_budget": "150%", **QUICK}
    if inside:
        mine = monet_like.auto_schedule(DistributedDataParallel(mine), **options)
    else:
        mine = DistributedDataParallel(monet_like.auto_schedule(mine, **options))
    torch.manual_seed(rank)
    batches = [{"x": torch.randn(17, 8)} for _ in range(2)]
    scalar = lambda result: result.square().mean()  # noqa: E731
    found = trained(mine, batches, scalar)
    assert all(map(torch.equal, found, trained(DistributedDataParallel(plain), batches, scalar)))
    assert list((mine if inside else mine.module)._parts) == ["module.stem" if inside else "stem"]


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_one_line_serves_replicated_models(tmp_path: Path, inside: bool) -> None:
    together(tmp_path, _replicated, inside, within_seconds=300.0)


class Averaged(nn.Module):
    """Two parts, between which processes average what they have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = all_reduce(self.before(x)) / dist.get_world_size()
        return self.behind(middle)


def _averaged(rank: int) -> None:
    plan_briefly()
    torch.manual_seed(0)
    plain = Averaged()
    one_bound: Any = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget=(10**9, 1000)[rank], **QUICK)
    with pytest.raises(InfeasibleError):  # in the other process, too: its step would wait for ever
        one_bound(torch.randn(32, 8))
    mine: Any = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget=("150%", "90%")[rank], **QUICK)
    batches = [{"x": torch.randn(32, 8)} for _ in range(2)]
    scalar = lambda result: result.square().mean()  # noqa: E731
    assert all(map(torch.equal, trained(mine, batches, scalar), trained(plain, batches, scalar)))
    assert list(mine._parts) == ["before", "behind"]


@pytest.mark.slow
def test_processes_whose_forwards_wait_for_each_other_rehearse_together(tmp_path: Path) -> None:
    together(tmp_path, _averaged, within_seconds=60.0)
