"""Mistakes put into the real kernels are noticed: a barrier left out, a comparison `a < b` that became `a <= b`.

The emulator makes both at run time, so that nothing is compiled again. Of each source file the first few mistakes of
either kind are tried, and most must be noticed: some change nothing, such as a bound that a later condition repeats.
``python -m tests.cuda_emulator --mistakes`` tries all and prints how each was noticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch

from . import check_kernels, control

ALL = os.environ.get("MONET_LIKE_EMULATED_MISTAKES") == "all"
SOURCES = control.sources()
#: Mistakes of one kind and file that are tried.
TRIES = None if ALL else 3


def _checks() -> list[Callable[[], None]]:
    """The tests of the operators: those with common shapes for a few types, the random ones for a few seeds."""
    common = (
        check_kernels.test_common_max_pool,
        check_kernels.test_common_batch_norm,
        check_kernels.test_common_rms_norm,
    )
    pool, norm, rms = common
    checks: list[Callable[[], None]] = [
        check_kernels.test_masks_of_all_sizes,
        *(partial(pool, 3, 1, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(partial(norm, channels_last, torch.float32) for channels_last in (False, True)),
        partial(rms, "wide", torch.bfloat16),
    ]
    tests = [getattr(check_kernels, name) for name in dir(check_kernels) if name.startswith("test_")]
    drawn = [test for test in tests if "seed" in test.__code__.co_varnames[: test.__code__.co_argcount]]
    return [*checks, *(partial(test, seed) for seed in (1, 2) for test in drawn)]


CHECKS = _checks()


def run(check: Callable[[], None], number: int) -> None:
    """One check from a known state."""
    check_kernels.start(number)
    try:
        check()
    finally:
        control.configure()


@pytest.fixture(scope="module")
def users() -> dict[str, list[int]]:
    """For each source file the checks that launch its kernels; a header has those of all."""
    found: dict[str, list[int]] = {file: [] for file, _ in SOURCES["kernels"]}
    for number, check in enumerate(CHECKS):
        before = control.launches()
        run(check, number)
        launched = {name for name, count in control.launches().items() if count > before.get(name, 0)}
        for file in {file for file, name in SOURCES["kernels"] if name in launched}:
            found[file].append(number)
    return found


def noticed(mistake: dict[str, Any], checks: list[int]) -> str:
    """How the first check fails that notices this mistake; empty if none does."""
    for number in checks:
        control.make_mistake(**mistake)
        try:
            run(CHECKS[number], number)
        except (RuntimeError, AssertionError) as error:
            return str(error).splitlines()[0] if str(error) else "other values"
        finally:
            control.make_mistake()
    return ""


BARRIERS = [(file, {"barrier": f"{file}:{line}"}, f"no barrier in line {line}") for file, line in SOURCES["barriers"]]
BOUNDS = [(m["file"], {"mutant": m["number"]}, f"{m['what']} in line {m['line']}") for m in SOURCES["mutants"]]
GROUPS = [(file, list(group)) for kind in (BARRIERS, BOUNDS) for file, group in groupby(kind, key=lambda m: m[0])]


@pytest.mark.parametrize(("file", "mistakes"), GROUPS, ids=[f"{f}-{m[0][2].split()[0]}" for f, m in GROUPS])
def test_mistakes_are_noticed(file: str, mistakes: list[Any], users: dict[str, list[int]]) -> None:
    checks = users.get(file, list(range(len(CHECKS))))
    missed = []
    for _, mistake, what in mistakes[:TRIES]:
        how = noticed(mistake, checks)
        print(f"{file}: {what}: {how[:150] or 'NOT NOTICED'}")
        missed += [] if how else [what]
    assert len(missed) <= max(1, len(mistakes[:TRIES]) // 2), missed


def test_there_are_mistakes_to_make() -> None:
    assert any(file.endswith(".cu") for file, _ in GROUPS) and len(GROUPS) > 3
