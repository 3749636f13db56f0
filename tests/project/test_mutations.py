"""Damaged schedule and profile files: one clear error, or a step that is plain PyTorch's to the bit; and the net
itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mutations
from benchmarks.mutations import Mutations, Outcome, summary
from monet_like.errors import ScheduleFileError
from monet_like.ir.schedule_file import ScheduleRecord

COUNT = 300


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mutations:
    return Mutations(1, tmp_path_factory.mktemp("mutations"))


@pytest.mark.slow
def test_some_hundreds_of_mutations(made: Mutations) -> None:
    """``python -m benchmarks.mutations`` makes 10,000, with another seed."""
    outcomes = list(map(made.outcome, range(COUNT)))
    text = summary(outcomes, 1)
    assert [outcome for outcome in outcomes if outcome.is_fault] == [], text
    assert 0.03 * COUNT < sum(outcome.end == "right" for outcome in outcomes) < 0.5 * COUNT, text
    for kind in ("bytes", "structure", "numbers"):
        for file in ("schedule", "profile"):
            assert sum(outcome.kind == f"{file}, {kind}" for outcome in outcomes) > 0.02 * COUNT, text


def test_a_number_makes_the_same_mutation_again(made: Mutations, tmp_path: Path) -> None:
    first = made.outcome(17)
    content = (made.folder / "mutated").read_bytes()
    again = made.outcome(17)
    assert (again.kind, again.end, again.told) == (first.kind, first.end, first.told)
    assert (made.folder / "mutated").read_bytes() == content


def outcome_of(made: Mutations, monkeypatch: pytest.MonkeyPatch, data: bytes) -> Outcome:
    monkeypatch.setattr(made, "mutation", lambda subject, draw: ("schedule, bytes", data))
    return made.outcome(0)


def test_what_is_valid_is_right(made: Mutations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject = made.subjects[0]
    subject.record.save(tmp_path / "valid")
    monkeypatch.setattr(made, "subjects", (subject,))
    assert outcome_of(made, monkeypatch, (tmp_path / "valid").read_bytes()).end == "right"


def test_the_net_catches_faults(made: Mutations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another exception, another gradient, a hang, and code that runs."""
    subject = made.subjects[0]
    subject.record.save(tmp_path / "valid")
    data = (tmp_path / "valid").read_bytes()
    monkeypatch.setattr(made, "subjects", (subject,))

    def load(path: Path) -> ScheduleRecord:
        return subject.record

    def instead(function: Any) -> Outcome:
        with monkeypatch.context() as patch:
            patch.setattr(ScheduleRecord, "load", staticmethod(function))
            return outcome_of(made, monkeypatch, data)

    def broken(path: Path) -> ScheduleRecord:
        raise TypeError("extent")

    def lines(path: Path) -> ScheduleRecord:
        raise ScheduleFileError("one\ntwo")

    def slow(path: Path) -> ScheduleRecord:
        time.sleep(5)
        return subject.record

    def running(path: Path) -> ScheduleRecord:
        os.system("true")
        return subject.record

    assert instead(load).end == "right"
    assert instead(broken).end == "raised TypeError"
    assert instead(lines).end == "refused in several lines"
    assert instead(running).end == "ran code"
    monkeypatch.setattr(mutations, "LIMIT_SECONDS", 0.2)
    assert instead(slow).end == "took too long"
    monkeypatch.setattr(mutations, "LIMIT_SECONDS", 60.0)
    name = "gradient of second.weight"
    wrong = {**subject.plain, name: 1.0001 * subject.plain[name]}
    monkeypatch.setattr(made, "subjects", (replace(subject, plain=wrong),))
    assert instead(load).end == "trained with other results"
