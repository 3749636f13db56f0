"""The order of kernels: costs and memory by hand, properties of random chains, and gradients of layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import uncompiled
from layers import LAYERS
from torch import nn

import monet_like
from monet_like.inductor.order import Arrangement, Chain, Item, arranged
from monet_like.inductor.partitioner import PlannedPartitioner
from monet_like.inductor.planned_graph import PlannedGraph

UNLIMITED = 10**9


def chain(items: Sequence[Item], given: Sequence[int], kept: Sequence[int], sizes: int = 10) -> Chain:
    tensors = {v for item in items for v in (*item.reads, *item.writes)}
    each = dict.fromkeys(tensors, sizes)
    return Chain(tuple(items), each, each, frozenset(given), frozenset(kept), 1)


#: A norm, a product of it, a cast of the norm, and another product of the cast.
NORM = (Item((0,), (1,), True), Item((1,), (2,), False), Item((1,), (3,), True), Item((3,), (4,), False))


def test_a_cast_joins_the_norm_that_it_reads() -> None:
    """Apart: 20 bytes, 20 bytes and two launches. Together: one tensor is read, two are written."""
    found = chain(NORM, [0], [2, 4])
    assert Arrangement(found, found.spots).total == 42
    made = arranged(found, UNLIMITED)
    assert made.order() == [0, 2, 1, 3]
    assert made.total == 31


def test_a_cast_stays_where_memory_has_no_room() -> None:
    """A cast beside the norm is there while the first product runs, which may need more than there is."""
    tight = replace(chain(NORM, [0], [2, 4]), sizes={0: 1, 1: 10, 2: 10, 3: 30, 4: 1})
    made = arranged(tight, 50)
    assert made.order() == [0, 2, 1, 3]
    assert max(made.followed(50)[0]) == 50
    wide = Item((1,), (2,), False, beside_bytes=25)  # then the product runs before the cast
    tight = replace(tight, items=(NORM[0], wide, *NORM[2:]))
    made = arranged(tight, 51)
    assert made.order() == [0, 1, 2, 3]
    assert made.followed(51)[0] == [11, 45, 50, 41]


def test_what_is_read_within_a_group_alone_needs_no_memory_and_moves_nothing() -> None:
    items = (Item((0,), (1,), True), Item((1,), (2,), True), Item((2,), (3,), False))
    made = arranged(chain(items, [0], [3]), UNLIMITED)
    assert made.total == 20 + 1
    assert made.followed(UNLIMITED)[0] == [20, 20, 20]
    assert made.followed(UNLIMITED)[1] == [0, 0, 1]


def test_a_place_is_split_where_its_kernels_do_not_fit_together() -> None:
    """Each reads an input of its own and writes a result of its own; inputs end with their readers."""
    items = (*(Item((k,), (10 + k,), True) for k in range(3)), Item((10, 11, 12), (20,), False))
    made = arranged(chain(items, [0, 1, 2], [20]), UNLIMITED)
    assert made.followed(UNLIMITED)[0] == [60, 60, 60, 40]
    levels, groups = made.followed(40)
    assert (levels, groups) == ([40, 40, 40, 40], [0, 1, 2, 3])


def random_chain(seed: int) -> Chain:
    draw = random.Random(seed)
    items, made = [], [0, 1, 2]
    for k in range(draw.randint(4, 25)):
        reads = tuple(draw.sample(made, min(len(made), draw.randint(1, 3))))
        earlier = tuple(j for j in range(k) if draw.random() < 0.03)
        items.append(Item(reads, (3 + k,), draw.random() < 0.6, draw.choice([0, 0, 5]), earlier))
        made.append(3 + k)
    sizes = {v: draw.choice([1, 10, 100]) for v in made}
    return Chain(tuple(items), sizes, sizes, frozenset((0, 1, 2)), frozenset(draw.sample(made[3:], 2)), 3)


@pytest.mark.parametrize("seed", range(60))
def test_random_chains_are_in_a_right_order_and_within_the_limit(seed: int) -> None:
    found = random_chain(seed)
    given = Arrangement(found, found.spots)
    apart = max(given.followed(0)[0])  # each kernel by itself: what the order needs at least
    for limit in (0, apart, 2 * apart, UNLIMITED):
        made = arranged(found, limit)
        order = made.order()
        assert sorted(order) == list(range(len(found.items)))
        place = {k: at for at, k in enumerate(order)}
        assert all(place[other] < place[k] for k in order for other in found.before[k])
        assert [k for k in order if not found.items[k].moves] == [k for k, i in enumerate(found.items) if not i.moves]
        assert max(made.followed(max(limit, apart))[0]) <= max(limit, apart)
        assert made.total <= given.total
        groups = [made.followed(max(limit, apart))[1][k] for k in order]
        assert groups == sorted(groups)


def gradients(run: Any, model: nn.Module, args: tuple[Any, ...]) -> list[torch.Tensor]:
    leaves = [p for p in (*model.parameters(), *args) if p.requires_grad]
    result = run(*args)
    (*found,) = torch.autograd.grad(result.square().sum(), leaves)
    return [result, *found]


@pytest.mark.slow(but=["gpt2-100%"])
@pytest.mark.parametrize(("name", "budget"), [("gpt2", "100%"), *((name, "85%") for name in LAYERS)])
def test_gradients_in_another_order_are_those_of_plain_pytorch(
    name: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, ordered = PlannedPartitioner._planned, []

    def in_order(self: PlannedPartitioner, *asked: Any) -> PlannedGraph:
        graph = planned(self, *asked)
        ordered.append(replace(graph, fused_within=2 * graph.peak_bytes))
        return ordered[-1]

    monkeypatch.setattr(PlannedPartitioner, "_planned", in_order)
    model, args = LAYERS[name](True)
    wanted = gradients(model, model, args)
    options = monet_like.compile_options(budget, quick=True, measured=False)
    run = torch.compile(model, backend=uncompiled(options), dynamic=False)
    most = max(gradient.detach().abs().max().item() for gradient in wanted)
    for a, b in zip(gradients(run, model, args), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * most)
    assert ordered
