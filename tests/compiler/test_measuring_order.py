"""What is measured first, what is kept of an interrupted profile, and what is reused from which day."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monet_like.capture.captured import Captured, distinct_tasks
from monet_like.compiler import costs, influence
from monet_like.compiler.influence import by_influence, in_parts
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.request import Request, captured_for
from monet_like.compiler.sources import Cached, Filed
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import REFUSED, Cost, Task
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.profile.store import keep, store_path

CPU = torch.device("cpu")
MODE = "inplace_conv_multiway_newnode"


def problem(batch: int = 4) -> tuple[Request, Captured]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2)
    )
    request = Request(net.train(), ((torch.randn(batch, 3, 12, 12),), {}), MODE)
    return request, captured_for(request, request.example)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The keys of every part that is measured; more than three parts of few operators are allowed."""
    found: list[list[str]] = []
    measure = costs.measure

    def noting(tasks: Mapping[str, Task], maker: Any, **options: Any) -> dict[str, Cost]:
        found.append([*tasks])
        return measure(tasks, maker, **options)

    monkeypatch.setattr(costs, "measure", noting)
    monkeypatch.setattr(influence, "LEAST_PART", 1)
    yield found


def test_operators_with_a_choice_come_first() -> None:
    _, captured = problem()
    estimated = roofline(captured, DEVICES["cpu"])
    ordered = by_influence(distinct_tasks(captured), captured, estimated)
    program = captured.program
    free = {task.cost for task in program.tasks} | {w.cost for slot in program.slots if len(slot) > 1 for w in slot}
    deciding = [key in free for key in ordered]
    assert deciding == sorted(deciding, reverse=True)
    assert 0 < deciding.count(False) < len(deciding)
    counts = dict.fromkeys(ordered, 0.0)
    for task in (*program.tasks, *(way for slot in program.slots if len(slot) > 1 for way in slot)):
        counts[task.cost] += estimated[task.cost].seconds
    assert [counts[key] for key in ordered] == sorted(counts.values(), reverse=True)


def test_parts_have_about_equal_influence(monkeypatch: pytest.MonkeyPatch) -> None:
    _, captured = problem()
    keys = [*distinct_tasks(captured)]
    estimated = dict.fromkeys(keys, Cost(1.0))
    ordered = by_influence(keys, captured, estimated)
    assert in_parts(ordered, captured, estimated) == [ordered]  # few: runs of one must not follow each other
    monkeypatch.setattr(influence, "LEAST_PART", 1)
    parts = in_parts(ordered, captured, estimated)
    assert len(parts) == 3 and [key for part in parts for key in part] == ordered
    found = influence.influences(captured, estimated)
    shares = [sum(found[key] for key in part) / sum(found.values()) for part in parts]
    assert max(shares) - min(shares) <= 2 * max(found.values()) / sum(found.values())
    unknown = dict.fromkeys(keys, REFUSED)  # no rates: nothing has more influence than another
    assert in_parts(sorted(keys), captured, unknown) == [sorted(keys)]


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("batches", [(4, None), (16, 4)])
def test_what_was_measured_before_an_interrupt_is_kept(
    batches: tuple[int, int | None], asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, small = batches
    request, captured = problem(batch)
    request = replace(request, profile_batch=small)
    saved: list[Profile] = []
    measure, parts_before = costs.measure, 0 if small is None else 1  # first the workspaces at twice the batch

    def interrupted(*args: Any, **options: Any) -> dict[str, Cost]:
        if len(asked) == 1 + parts_before:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(costs, "measure", interrupted)
    monkeypatch.setattr(costs, "today", lambda: "2026-11-24")
    with pytest.raises(KeyboardInterrupt):
        prepare(request, CPU, save_profile=saved.append)
    first = asked[parts_before]
    (left,) = saved
    assert [*left.costs] == first and left.days == dict.fromkeys(first, "2026-11-24")
    ordered = by_influence(distinct_tasks(captured), captured, roofline(captured, DEVICES["cpu"]))
    assert first == ordered[: len(first)]

    monkeypatch.setattr(costs, "measure", measure)
    monkeypatch.setattr(costs, "today", lambda: "2026-11-25")
    asked.clear()
    ready = prepare(request, CPU, profile=left, save_profile=saved.append)
    assert [key for part in asked[parts_before:] for key in part] == ordered[len(first) :]
    how = "measured at batch 4" if small is None else "measured at batch 4, scaled to 16"
    assert ready.profile.note == f"{how}; {len(first)} of {len(ordered)} operators reused, measured on 2026-11-24"
    assert saved[-1].days == {key: f"2026-11-{24 if key in first else 25}" for key in ordered}
    assert all(ready.costs[key] == left.costs[key] for key in first)

    asked.clear()
    again = prepare(request, CPU, profile=replace(saved[-1], note=""), save_profile=saved.append)
    assert asked == []
    count = len(ordered)
    assert again.profile.note == f"{count} of {count} operators reused, measured on 2026-11-24 to 2026-11-25"


def test_a_profile_that_does_not_know_its_day_is_reused_without_one() -> None:
    request, captured = problem()
    saved: list[Profile] = []
    prepare(request, CPU, save_profile=saved.append)
    ready = prepare(request, CPU, profile=replace(saved[-1], days={}, note=""))
    count = len(distinct_tasks(captured))
    assert ready.profile.note == f"{count} of {count} operators reused"


def test_where_all_is_known_nothing_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates for all operators of a large net take seconds."""
    request, captured = problem()
    known = costs.profiled(request, captured, CPU, None, None, None)

    def unwanted(*_: Any) -> dict[str, Cost]:
        raise AssertionError("estimated")

    monkeypatch.setattr(costs, "roofline", unwanted)
    assert costs.profiled(request, captured, CPU, known, None, None).costs == known.costs


def test_two_processes_add_to_one_store() -> None:
    """Each has read an empty one; costs under other settings are not mixed in."""
    path = store_path(CPU)
    here = costs.to_profile({}, CPU, "")
    for key, seconds in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        keep(replace(here, costs={key: Cost(seconds)}, days={key: f"2026-11-0{seconds:.0f}"}), path)
    stored = Profile.load(path)
    assert stored.costs == {"a": Cost(3.0), "b": Cost(2.0)}
    assert stored.days == {"a": "2026-11-03", "b": "2026-11-02"}
    keep(replace(here, costs={"a": Cost(3.0)}, scaled=frozenset("a")), path)
    keep(replace(here, costs={"b": Cost(2.0)}), path)
    assert Profile.load(path).scaled == {"a"}
    keep(replace(here, costs={"a": Cost(3.0, 5)}), path)  # measured at the whole batch
    assert Profile.load(path).scaled == frozenset() and Profile.load(path).costs["a"] == Cost(3.0, 5)
    keep(replace(here, costs={"c": Cost(4.0)}, settings={"threads": "64"}), path)
    assert Profile.load(path).costs == {"c": Cost(4.0)}
    path.write_text("{")
    keep(replace(here, costs={"d": Cost(5.0)}), path)
    assert Profile.load(path).costs == {"d": Cost(5.0)}


def test_sources_add_to_their_file(tmp_path: Path) -> None:
    """Two that have read it before either writes: the device's store, and a file of one's own, which keeps its note."""
    here = replace(costs.to_profile({}, CPU, ""), note="mine")
    for make, note in ((lambda: Cached.of(CPU), ""), (lambda: Filed.of(tmp_path / "mine.json"), "mine")):
        one, two = make(), make()
        one.save(replace(here, costs={"a": Cost(1.0)}))
        two.save(replace(here, costs={"b": Cost(2.0)}))
        kept = make().known
        assert isinstance(kept, Profile) and kept.costs == {"a": Cost(1.0), "b": Cost(2.0)} and kept.note == note


def test_costs_of_another_version_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store_path(CPU)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert store_path(CPU) != before
