"""Whole steps as people train on a GPU: the results of plain PyTorch's, at the peak that was predicted.

Skipped without one.

Some of CUDA's gradients are summed in no fixed order, so results are compared to rounding; a wrong random mask differs
by far more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from block_models import EXACT, Decoder, Layer, loss_of, measured_peak, plan_briefly, train
from later import Later
from quantised_nets import Make, adapted, by_torchao, four_bit
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.capture.precision import autocast_as
from monet_like.profile.cublas import measured_bytes
from monet_like.replay.verify.steps import step_peak

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

CUDA = torch.device("cuda", 0)
huggingface, transformers = Later("monet_like.integrations.huggingface"), Later("transformers")
OPTIONS: dict[str, Any] = {"mode": EXACT, "effort": "quick"}


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plan_briefly(monkeypatch.setattr)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch.cuda.empty_cache()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    found = (p.grad for p in model.parameters() if p.requires_grad)
    return [getattr(grad, "to_local", lambda grad=grad: grad)() for grad in found if grad is not None]


def assert_trained_alike(plain: nn.Module, mine: nn.Module, x: torch.Tensor, autocast: str = "") -> None:
    rounding = 1e-4 if not autocast and x.dtype in (torch.float32, torch.int64) else 2e-2
    for seed in range(3):
        for model in (plain, mine):
            model.zero_grad()
        results = [train(model, x, seed, autocast) for model in (plain, mine)]
        grads = [gradients_of(model) for model in (plain, mine)]
        assert len(grads[0]) == len(grads[1]) > 0
        pairs = list(zip([results[0], *grads[0]], [results[1], *grads[1]], strict=True))
        largest = max(float(grad.double().norm()) for grad in grads[0])
        for expected, found in pairs:  # of a bias before a norm nothing but rounding is left
            size = max(float(expected.double().norm()), 1e-2 * largest)
            assert float((expected.double() - found.double()).norm()) <= rounding * size


class Attending(nn.Module):
    """A layer whose attention drops probabilities in PyTorch's fused kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(*parts, dropout_p=0.2).transpose(1, 2).flatten(2))


# cuBLAS's workspaces, 67 MB, count as well: in smaller models they are most of the memory.
def words(batch: int = 64, length: int = 512) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(3)).to(CUDA)


@pytest.mark.parametrize("autocast", ["", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("block", "blocks"), [(Layer, None), (Attending, None), (Layer, "layers.*")], ids=["whole", "attending", "blocks"]
)
def test_random_masks_are_drawn_again(blocks: str | None, block: Callable[[int], nn.Module], autocast: str) -> None:
    plain, x = Decoder(block, width=64).to(CUDA), words()
    with autocast_as(autocast, CUDA):
        mine = monet_like.auto_schedule(
            copy.deepcopy(plain),
            (x,),
            memory_budget="85%",
            blocks=blocks,
            **OPTIONS,
            **({"loss": loss_of} if blocks else {}),
        )
    records = [one.record for one in blocks_of(mine)] if blocks else [mine.record]
    assert any(record.schedule.rerun_count for record in records)
    assert_trained_alike(plain, mine, x, autocast)
    if blocks:
        plan = monet_like.block_plan(mine)
        assert measured_peak(mine, x, autocast) == pytest.approx(plan.peak_bytes - measured_bytes(CUDA), rel=0.01)


QUANTISED: dict[str, tuple[Make, torch.dtype]] = {
    "nf4": (four_bit(), torch.float32),
    "nf4 in bfloat16": (four_bit(dtype=torch.bfloat16), torch.bfloat16),
    "torchao int8": (by_torchao("Int8WeightOnlyConfig", dtype=torch.bfloat16), torch.bfloat16),
}


@pytest.mark.parametrize("name", list(QUANTISED))
def test_quantised_weights(name: str) -> None:
    pytest.importorskip("torchao" if name.startswith("torchao") else "bitsandbytes")
    make, dtype = QUANTISED[name]
    nets = [adapted(make, dtype).to(CUDA) for _ in range(2)]
    x = torch.randn(2048, 32, 64, dtype=dtype, device=CUDA)
    mine = monet_like.auto_schedule(nets[1], (x,), memory_budget="97%", **OPTIONS)
    assert_trained_alike(nets[0], mine, x)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["", "bfloat16"])
def test_blocks_that_are_sharded(precision: str, group: None) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision else MixedPrecisionPolicy()
    plain, x = Decoder(Layer, width=64).to(CUDA), words()
    mine: Any = monet_like.auto_schedule(
        copy.deepcopy(plain), memory_budget="75%", blocks="layers.*", loss=loss_of, **OPTIONS
    )
    for model in (plain, mine):
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    assert_trained_alike(plain, mine, x, precision)
    plan = monet_like.block_plan(mine)
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes


def test_distributed_data_parallel(group: None) -> None:
    plain, x = Decoder(Layer, width=64).to(CUDA), words()
    mine = monet_like.auto_schedule(copy.deepcopy(plain), (x,), memory_budget="75%", **OPTIONS)
    assert_trained_alike(DistributedDataParallel(plain), DistributedDataParallel(mine), x)


def test_scaled_losses_in_float16() -> None:
    """With a `GradScaler` and an optimizer in one kernel, over several steps."""
    plain, x = Decoder(Layer, width=64).to(CUDA), words()
    with autocast_as("float16", CUDA):
        mine = monet_like.auto_schedule(copy.deepcopy(plain), (x,), memory_budget="70%", **OPTIONS)
    losses = []
    for model in (plain, mine):
        optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")
        found = []
        for seed in range(5):
            torch.manual_seed(seed)
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model(x))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(float(loss))
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[0][-1] != pytest.approx(losses[0][0], rel=1e-2)


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    def trained(*callbacks: Any) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes)).train()
        data = [{"input_ids": row, "labels": row} for row in (torch.arange(2**16).view(128, 512) * 7 % 61)]
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=32, report_to=[], disable_tqdm=True, save_steps=10
        )
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks)).train()
        return model

    budget = huggingface.MemoryBudget("80%", **OPTIONS)
    plain, mine = trained(), trained(budget)
    assert budget.wrapper.record.peak_bytes <= 0.8 * budget.wrapper.record.plain_peak_bytes
    assert next(mine.parameters()).device.type == "cuda"
    for (name, one), other in zip(plain.named_parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("autocast", ["", "float16"])
def test_volumes(autocast: str, layout: torch.memory_format) -> None:
    monai = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    plain = monai.BasicUNet(3, 1, 2, features=(8, 8, 16, 16, 16, 8), dropout=0.1).to(CUDA, memory_format=layout).train()
    x = torch.randn(4, 1, 64, 64, 64, device=CUDA).to(memory_format=layout)
    with autocast_as(autocast, CUDA):
        mine = monet_like.auto_schedule(copy.deepcopy(plain), (x,), memory_budget="90%", **OPTIONS)
    assert mine.record.schedule.rerun_count
    assert_trained_alike(plain, mine, x, autocast)
    with autocast_as(autocast, CUDA):
        assert step_peak(mine, ((x,), {}), CUDA) == pytest.approx(
            mine.record.peak_bytes - mine.record.extra_bytes, rel=0.01
        )
