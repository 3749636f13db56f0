"""Variants from outside the package: registered, offered in their place, checked, and refused in words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replays import record_for, replayed, worst
from torch import nn
from training import run, twin

import monet_like
from monet_like.capture.lower.step import capture
from monet_like.errors import MonetError, ScheduleFileError, UsageError
from monet_like.ir.mode import is_lossy, parse_mode
from monet_like.ir.program import Call, Program, Ref
from monet_like.ir.schedule import Schedule
from monet_like.plan import store_all
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.testing import check_variant
from monet_like.variants import admitted, register_variant, unregister_variant
from monet_like.variants.built_in import BUILT_IN
from monet_like.variants.editor import Editor
from monet_like.variants.plugins import names

MODE = "inplace_multiway_newnode"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test registers is taken out again."""
    yield
    for name in [name for name in names() if name not in BUILT_IN]:  # which stand before what they name
        unregister_variant(name)


def offering(factor: float = 1.0, word: str = "multiway", variant: str = "softplus.other") -> Callable[[Editor], None]:
    """A variant of softplus whose gradient is PyTorch's times a factor."""

    def offer_softplus(editor: Editor) -> None:
        for slot, way, call in list(editor.find_slots("aten.softplus_backward.default")):
            (result,) = call.outs
            between = type(result)("unscaled")
            calls = (
                *way.calls[:-1],
                Call(call.op, call.args, call.kwargs, (between,)),
                Call("aten.mul.Tensor", (between, factor), (), (result,)),
            )
            editor.add_way(slot, calls, variant, word=word)

    return offer_softplus


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Softplus(), nn.BatchNorm1d(5), nn.Linear(5, 2)).train(), torch.randn(4, 6)


def program_of(mode: str = MODE, model: nn.Module | None = None) -> Program:
    given, x = small()
    return admitted(capture(model or given, (x,), {}), mode).program


def variants_of(program: Program) -> set[str]:
    return {task.variant for task in program.every_task()}


def test_a_registered_variant_is_offered_in_its_place_and_replayed() -> None:
    seen: list[set[str]] = []

    @monet_like.register_variant
    def offer_first(editor: Editor) -> None:
        seen.append({task.variant for task in editor.every_task()})

    register_variant(offering(), before="first")
    order = names()
    place = order.index("softplus")
    assert order[place : place + 3] == ("softplus", "first", "in_place")
    assert order[:place] + order[place + 2 :] == tuple(BUILT_IN)
    model, x = small()
    captured = admitted(capture(model, (x,), {}), MODE)
    assert seen and "softplus.other" in seen[0]
    (slot,) = [k for k, ways in enumerate(captured.program.slots) if "softplus.other" in {way.variant for way in ways}]
    plain = store_all(captured.program)
    way = [way.variant for way in captured.program.slots[slot]].index("softplus.other")
    schedule = Schedule(plain.forward, plain.again, (*plain.ways[:slot], way, *plain.ways[slot + 1 :]))
    built = (model, (x,), {})
    assert worst(run(twin(model), (x,), {}), replayed(built, captured, schedule, MODE, measured=False)) == 0.0


def test_the_fingerprint_changes_only_where_something_is_offered() -> None:
    relu = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    with_softplus, without = program_of().fingerprint, program_of(model=relu).fingerprint
    not_admitted = program_of("normal").fingerprint
    register_variant(offering())
    assert program_of().fingerprint != with_softplus
    assert program_of(model=relu).fingerprint == without
    assert program_of("normal").fingerprint == not_admitted
    unregister_variant("softplus")
    assert program_of().fingerprint == with_softplus


def test_a_word_of_its_own_admits_it_and_nothing_else_does() -> None:
    before = program_of().fingerprint
    with pytest.raises(UsageError, match=r"unknown word 'soft'.*words of their own \(here: none\)"):
        parse_mode("inplace_soft")
    asked: list[frozenset[str]] = []

    def offer(editor: Editor) -> None:
        asked.append(editor.words)
        offering(word="soft")(editor)

    register_variant(offer, name="softplus", word="soft", lossy=True)

    assert "softplus.other" in variants_of(program_of(f"{MODE}_soft"))
    assert program_of().fingerprint == before
    assert asked == [parse_mode(f"{MODE}_soft")]  # so that no value that it adds is in other programs
    assert is_lossy("soft") and not is_lossy(MODE)
    with pytest.raises(UsageError, match=r"words of their own \(here: soft\)"):
        parse_mode("inplace_hard")
    unregister_variant("softplus")
    with pytest.raises(UsageError, match="unknown word 'soft'"):
        parse_mode("inplace_soft")


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda: register_variant(offering(), name="relu"),
        r"there is a variant 'relu' already, in this package; give another"),
        (lambda: register_variant(offering(), before="inplace"),
        r"no variant 'inplace' to stand before; there are: copy_slices, conc.*end"),
        (lambda: register_variant(lambda: None, name="two"),
        r"must be a function of one argument, the editor: too many"),
        (lambda: register_variant(lambda editor, other: None, name="two"), "two must be a function of one argument"),
        (lambda: register_variant(offering(), name="a.b"), r"letters, digits and _ only, 'a\.b' has others"),
        (lambda: register_variant(offering(), lossy=True), "is lossy, and so needs a mode word of its own"),
        (lambda: register_variant(offering(), word="conv"), "mode word 'conv' is taken"),
        (lambda: register_variant(offering(), word="dropitall"), "mode word 'dropitall' is taken"),
        (lambda: register_variant(offering(), word="a_b"), "mode word 'a_b' must be of small letters and digits"),
        (lambda: unregister_variant("relu"), "no variant 'relu' has been registered; registered: none"),
    ],
)  # fmt: skip
def test_wrong_registrations_are_refused_in_words(register: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        register()
    assert names() == tuple(BUILT_IN)


def test_a_name_is_registered_once_and_kept_while_others_need_it() -> None:
    register_variant(offering())
    with pytest.raises(
        UsageError, match=r"'softplus' already, by test_plugins; give .* unregister_variant\('softplus'\) first"
    ):
        register_variant(offering())
    register_variant(offering(variant="other"), name="other", before="softplus")
    with pytest.raises(UsageError, match="variant other is registered to stand before softplus"):
        unregister_variant("softplus")


def test_names_and_words_of_what_a_variant_adds_are_checked() -> None:
    register_variant(offering(variant="relu2.other"))
    with pytest.raises(UsageError, match=r"softplus adds .* as 'relu2\.other'; .* such as softplus\.packed"):
        program_of()
    unregister_variant("softplus")
    register_variant(offering(word="multi"))
    with pytest.raises(
        UsageError, match=r"softplus\.other with mode word 'multi', which no mode has; give one of '', 'inplace'"
    ):
        program_of()


def of_other_gradients(editor: Editor) -> None:
    """A way that reads no gradient, where the slot's first way does."""
    for slot, way, call in list(editor.find_slots("aten.softplus_backward.default")):
        zeros = Call("aten.zeros_like.default", (call.args[1],), (), call.outs)
        editor.add_way(slot, (*way.calls[:-1], zeros), "faulty.zeros", word="multiway")


def of_an_unmade_tensor(editor: Editor) -> None:
    for slot, way, call in list(editor.find_slots("aten.softplus_backward.default")):
        unmade = replace(call, args=(*call.args[:2], Ref("nowhere"), *call.args[3:]))
        editor.add_way(slot, (*way.calls[:-1], unmade), "faulty.unmade", word="multiway")


def of_an_error(editor: Editor) -> None:
    offering(variant="faulty.half")(editor)
    raise KeyError("beta")


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (of_other_gradients, r"faulty\.zeros reads other gradients than its slot's first way"),
        (of_an_unmade_tensor, r"faulty\.unmade uses nowhere before it makes it"),
        (of_an_error, "KeyError: 'beta'"),
    ],
)
def test_a_variant_that_fails_is_left_out_with_a_warning(offer: Callable[[Editor], None], words: str) -> None:
    without = program_of()
    register_variant(offer, name="faulty")
    register_variant(offering(), name="softplus")
    with pytest.warns(UserWarning, match=rf"operator variant faulty is left out of this program.*{words}"):
        found = program_of()
    assert variants_of(found) == {*variants_of(without), "softplus.other"}
    with pytest.raises((MonetError, KeyError), match=words.removeprefix("KeyError: ")):
        check_variant("faulty", *small())


def test_a_schedule_is_refused_in_words_where_its_variant_is_not_registered(tmp_path: Path) -> None:
    register_variant(offering())
    model, x = small()
    captured = admitted(capture(model, (x,), {}), MODE)
    record = record_for(captured, store_all(captured.program), MODE, (model, (x,), {}))
    record.counts["variant softplus.other"] = 1
    record.save(tmp_path / "plan.json")
    ScheduleWrapper(twin(model), tmp_path / "plan.json", example=((x,), {}))
    unregister_variant("softplus")
    with pytest.raises(
        ScheduleFileError,
        match=r"the schedule takes the variants softplus\.other, which nothing offers here: .* import the",
    ):
        ScheduleWrapper(twin(model), tmp_path / "plan.json", example=((x,), {}))


# check_variant ------------------------------------------------------------------------------------------------


def test_exact_variants_are_exact() -> None:
    model, x = small()
    found = check_variant(offering(), model, x)
    assert repr(found) == "exact"
    assert found.judgement == "exact"
    assert found.taken == {"softplus.other": 6}
    assert {verdict.name for verdict in found.verdicts} >= {"output 0", "gradient of 0.weight", "buffer 2.running_mean"}
    assert names() == tuple(BUILT_IN)  # it is not registered any more


def test_rounding_is_told_from_errors() -> None:
    model, x = small()
    found = check_variant(offering(1 + 1e-6), model, x)
    assert found.judgement == "rounding"
    assert repr(found).startswith("equal to rounding (largest ")
    found = check_variant(offering(1.01), model, x)
    assert found.judgement == "wrong"
    assert repr(found).startswith("wrong: gradient of 0.")
    assert "differs by" in repr(found)


def test_registered_and_built_in_variants_are_checked_by_name() -> None:
    model, x = small()
    register_variant(offering(1.5, word="soft"), word="soft", lossy=True)
    assert check_variant("softplus", model, (x,)).judgement == "wrong"
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    found = check_variant("relu", convolutions, torch.randn(2, 3, 8, 8))
    assert repr(found).startswith("exact")
    assert any(found.taken.values())
    with pytest.raises(UsageError, match="there is no variant 'selu'; there are: copy_slices, concatenation"):
        check_variant("selu", model, x)


def test_a_variant_that_adds_nothing_is_no_success() -> None:
    with pytest.raises(UsageError, match=r"softplus .* adds nothing to the program of Linear"):
        check_variant(offering(), nn.Linear(3, 3), torch.randn(2, 3))


def test_importing_the_package_for_plug_ins_needs_no_torch() -> None:
    code = "import sys, monet_like; monet_like.register_strategy; dir(monet_like); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert monet_like.testing.check_variant is check_variant
