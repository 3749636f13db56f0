"""A part of PyTorch's databases of operators and modules: samples are right, or refused where
docs/limits.md says so.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from later import Later

from benchmarks.verdicts import CRASHED, REFUSED, RIGHT, SLOW, WRONG

database = Later("benchmarks.operator_database")

#: Operators whose results, errors or gradients are unlike most others'.
UNUSUAL = (
    "linalg.tensorsolve", "lu_unpack", "segment_reduce.offsets", "multi_margin_loss", "multilabel_margin_loss",
    "polygamma_n_2",
    "rot90", "mH", "alpha_dropout", "sparse.mm.reduce",
)  # fmt: skip
#: What may be refused, beside sizes and branches that depend on values.
MAY_BE_REFUSED = re.compile(r"layout torch\.sparse|momentum=None")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cuDNN, which the command changes, as they were afterwards."""
    for name in ("allow_tf32", "deterministic"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))


def judged(samples: object) -> None:
    """Assert that all samples are right or, where that is allowed, refused; and that most are trained at all."""
    found = [database.judge(sample) for sample in samples]  # type: ignore[attr-defined]
    bad = [
        verdict
        for verdict in found
        if verdict.status in (WRONG, CRASHED, SLOW)
        or (verdict.status == REFUSED and not MAY_BE_REFUSED.search(verdict.detail))
    ]
    assert not bad
    right = sum(verdict.status == RIGHT for verdict in found)
    assert right > len(found) / 2, found


def test_samples_of_unusual_operators_are_right() -> None:
    judged(sample for name in UNUSUAL for sample in database.operators(1, "cpu", torch.float32, only=name))


def test_repeats_that_add_up_to_a_given_size_are_measured() -> None:
    (sample,) = (s for s in database.operators(7, "cpu", torch.float32, only="repeat_interleave") if s.name[-1] == "4")
    verdict = database.judge(sample)
    assert (verdict.status, verdict.detail) == (RIGHT, "")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_of_operators_from_all_over_are_right(dtype: torch.dtype) -> None:
    judged(database.operators(1, "cpu", dtype, part=5, parts=46))


@pytest.mark.slow
def test_samples_of_modules_from_all_over_are_right() -> None:
    judged(database.modules(1, "cpu", torch.float32, part=3, parts=12))


def test_a_command_writes_a_line_for_each_sample_and_a_table(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    result = CliRunner().invoke(database.main, ["modules", "--only", "Tanh", "--samples", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["name"] for line in lines} >= {"nn.Tanh 0", "nn.Tanhshrink 0"}
    assert all(line["status"] == "right" for line in lines)
    assert re.search(rf"right\W+{len(lines)}\b", result.output)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (sample,) = database.modules(1, "cpu", torch.float32, only="nn.Tanhshrink")
    own = database.step

    def step(model: torch.nn.Module, args: object, kwargs: object) -> object:
        outcome = own(model, args, kwargs)
        if not isinstance(model, database.Contained):  # a schedule around it
            outcome.gradients[0] = torch.nextafter(outcome.gradients[0], outcome.gradients[0] + 1)
        return outcome

    monkeypatch.setattr("benchmarks.operator_database.step", step)
    verdict = database.judge(sample)
    assert (verdict.status, verdict.detail) == (WRONG, "['gradient 0']")
