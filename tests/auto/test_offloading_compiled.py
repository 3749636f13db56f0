"""Blocks that Inductor compiles and that have on the host what their graphs save, on a CPU, where copies lie in files:
against plain PyTorch, and against what the allocator counts.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from block_models import EXACT, Decoder, loss_of, measured_peak, plan_of, tokens, train
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import monet_like
from benchmarks.unrun_kernels import unrun_kernels
from monet_like.auto import offloaded
from monet_like.auto.block import blocks_of
from monet_like.errors import InfeasibleError
from monet_like.export.graph_plans import _run_as_it_is
from monet_like.inductor import compiled_call
from monet_like.inductor.planned_graph import PlannedGraph
from monet_like.runtime.offloaded_calls import LEAST_BYTES, KeepingSaved, OffloadedCalls, those_that_leave
from monet_like.torch_versions import release

OPTIONS: dict[str, Any] = {
    "mode": f"{EXACT}_offload", "loss": loss_of, "effort": "quick", "blocks": "layers.*", "backend": "inductor",
    "verbose": False,
}  # fmt: skip
X = tokens(32, 64)
#: Of results and gradients in float64, relative.
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run operator by operator: no code is generated."""
    monkeypatch.setattr(compiled_call, "_without_donations", _run_as_it_is)


def decoder() -> Decoder:
    """With dropout, where this PyTorch draws in compiled code as in plain."""
    torch.manual_seed(0)
    model = Decoder(blocks=6).double()
    for part in model.modules() if release() < (2, 14) else ():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def least_bytes() -> int:
    """The smallest budget for which there are plans."""
    with pytest.raises(InfeasibleError) as error:
        monet_like.auto_schedule(decoder(), X, memory_budget=1, **OPTIONS)
    assert error.value.smallest_bytes is not None
    return error.value.smallest_bytes


@pytest.fixture(scope="module")
def without() -> int:
    """The least with which no block offloads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded, "ROOM", 0.0)
        return least_bytes()


@pytest.fixture(scope="module")
def scheduled(without: int) -> nn.Module:
    """A planned model, to be copied, with a budget for which blocks have to offload."""
    with_offloads = least_bytes()
    if with_offloads == without and release() < (2, 14):
        pytest.skip("blocks offload with this PyTorch, too, but the least budget that is named does not know of it")
    assert with_offloads < 0.9 * without
    return monet_like.auto_schedule(decoder(), X, memory_budget=(with_offloads + without) // 2, **OPTIONS)


def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the bytes that leave with each call."""
    found: list[int] = []
    ended = OffloadedCalls.forward_ended

    def counted(self: OffloadedCalls, values: Any) -> Any:
        found.append(sum(value.nbytes for value in values.values()))
        return ended(self, values)

    monkeypatch.setattr(OffloadedCalls, "forward_ended", counted)
    return found


def are_compiled(model: nn.Module) -> bool:
    calls = [kept.step.compiled for block in blocks_of(model) for kept in block._kept]
    return bool(calls) and all(call is not None and call.graphs for call in calls)


def assert_alike(plain: nn.Module, mine: nn.Module) -> None:
    """Gradients agree."""
    for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).abs().max() <= TOLERANCE * one.grad.abs().max()


@pytest.mark.usefixtures("uncompiled")
def test_a_step_has_plain_gradients_and_as_much_on_the_host_as_predicted(
    scheduled: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, plain, found = copy.deepcopy(scheduled), decoder(), sent_bytes(monkeypatch)
    for seed in (1, 2):
        found.clear()
        for model in (plain, mine):
            model.zero_grad()
            train(model, X, seed)
        assert_alike(plain, mine)
        assert found == [point.offloaded_bytes for point in plan_of(mine).points]
    assert are_compiled(mine) and sum(size > 0 for size in found) > 2


def test_a_step_needs_what_is_predicted(scheduled: nn.Module, without: int) -> None:
    """An incoming gradient may end earlier than a plan counts."""
    mine, plan = copy.deepcopy(scheduled), plan_of(scheduled)
    with unrun_kernels():
        peak = measured_peak(mine, X)
    assert are_compiled(mine)
    assert 0.9 * plan.peak_bytes <= peak <= plan.peak_bytes <= plan.budget_bytes < without


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("order", ["together", "kept", "one alone", "first in, first out"])
def test_calls_and_backwards_in_any_order_have_plain_gradients(scheduled: nn.Module, order: str) -> None:
    mine, plain = copy.deepcopy(scheduled), decoder()
    for model in (mine, plain):
        torch.manual_seed(1)
        first, second = loss_of(model(X)), loss_of(model(X))
        if order == "together":
            (first + second).backward()
            continue
        if order == "kept":
            first.backward(retain_graph=True)
        if order != "one alone":
            first.backward()
        second.backward()
    assert are_compiled(mine)
    assert_alike(plain, mine)


@pytest.mark.usefixtures("uncompiled")
def test_a_call_without_a_backward_leaves_nothing_behind(scheduled: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, storages, pack = copy.deepcopy(scheduled), list[StorageWeakRef](), KeepingSaved._pack
    own = {weight.untyped_storage()._cdata for weight in mine.parameters()}

    def packed(self: KeepingSaved, tensor: torch.Tensor) -> int:
        if tensor.untyped_storage()._cdata not in own:
            storages.append(StorageWeakRef(tensor.untyped_storage()))
        return pack(self, tensor)

    monkeypatch.setattr(KeepingSaved, "_pack", packed)
    result = mine(X)
    calls = blocks_of(mine)[0]._offloads
    assert calls is not None and len(calls._calls) == 6 and not all(storage.expired() for storage in storages)
    del result
    gc.collect()
    assert all(call() is None for call in calls._calls) and all(storage.expired() for storage in storages)


@pytest.mark.usefixtures("uncompiled")
def test_within_hooks_of_others_everything_goes_through_these(
    scheduled: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, plain, found, theirs = copy.deepcopy(scheduled), decoder(), sent_bytes(monkeypatch), list[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        theirs.append(tensor.nbytes)
        return tensor.detach()

    for model in (plain, mine):
        theirs.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            train(model, X)
    assert are_compiled(mine) and not found and sum(size >= LEAST_BYTES for size in theirs) > 6
    assert_alike(plain, mine)


@pytest.mark.usefixtures("uncompiled")
def test_blocks_that_are_not_compiled_after_all_offload_by_their_schedules(
    scheduled: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, plain = copy.deepcopy(scheduled), decoder()
    monkeypatch.setattr(PlannedGraph, "copies", lambda *_: ())
    found = sent_bytes(monkeypatch)
    with pytest.warns(UserWarning, match="more than the plan of the whole step gives"):
        train(mine, X)
    train(plain, X)
    assert sum(size > 0 for size in found) > 2 and not are_compiled(mine)
    assert_alike(plain, mine)


def keeping(most_bytes: int = 2**40) -> KeepingSaved:
    return KeepingSaved(OffloadedCalls(), most_bytes)


def test_only_what_nobody_else_holds_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product both factors are saved, of a sine its argument, of the exponential function its result: twice."""
    found, held = sent_bytes(monkeypatch), keeping()
    x, y = (torch.randn(200, 200, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with held.saving():
        inner = x * y
        result = inner.exp() * inner.sin()
    held.ended([y], [x, result])
    assert found == [3 * x.nbytes]  # y, the argument and the sine
    mine = torch.autograd.grad(result.sum(), (x, y))
    product = x.detach() * y.detach()
    expected = product.exp() * (product.sin() + product.cos())
    torch.testing.assert_close(mine, (expected * y.detach(), expected * x.detach()))


def test_what_is_changed_after_it_was_saved_is_an_error_as_in_plain_pytorch() -> None:
    for most_bytes in (0, 2**40):
        kept, x = keeping(most_bytes), torch.zeros(200, 200, requires_grad=True)
        with kept.saving():
            result = x.exp().exp()
        kept.ended([], [])
        with torch.no_grad():
            result.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_inputs_leave_first_then_the_largest_that_have_room() -> None:
    one = LEAST_BYTES
    sizes = [(False, 3 * one), (True, one), (False, 4 * one), (False, one - 1), (False, 2 * one)]
    assert those_that_leave(sizes, 2**40) == [1, 2, 0, 4]
    assert those_that_leave(sizes, 6 * one) == [1, 2]
    assert those_that_leave(sizes, 4 * one) == [1, 0]
    assert those_that_leave(sizes, one - 1) == []
