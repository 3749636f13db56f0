"""Shared by all tests: fixed seeds, caches of their own; each operator of ours and its twin."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# One thread for each test process: several share the cores, and how many threads oneDNN has decides which kernels it
# takes and how much they need, so with another number a test would meet another program.
os.environ.setdefault("MONET_LIKE_LIGER", "0")  # programs are the same, wherever Liger is installed
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# In the test's process: with more, Inductor starts processes that import PyTorch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT", "0")  # tests look at how Inductor compiles

import pytest
import torch

from monet_like import ops
from monet_like.plan.local_search import searcher
from monet_like.profile import cache_state

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from brief import FEW, FORGOTTEN_BYTES

cache_state._FORGOTTEN = FORGOTTEN_BYTES

#: Folders whose tests take up to minutes each: to compile CUDA kernels for a CPU, and to capture the zoo's models.
LONGEST = ("without_gpu", "zoo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that are marked slow")
    parser.addoption("--each", type=int, default=1, metavar="N", help="of the cases of each test run each Nth alone")


def _asks_for_rare(config: pytest.Config) -> bool:
    return bool(config.option.all or any("::" in argument for argument in config.args))


def _asks_for_slow(config: pytest.Config) -> bool:
    return bool(_asks_for_rare(config) or config.option.markexpr)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, unless ``--all``, ``-m`` or the name of a test asks for them.

    ``@pytest.mark.slow(but=["tied"])`` marks all cases of a test but these; ``slow(every=10)`` all but each tenth.
    For ``-m``, ``slow(rare=["tied"])`` leaves these cases out, ``slow(rare=3)`` all but each third, ``slow(rare=1)``
    all. Of what is left ``--each 3`` takes the first case of each test, the fourth, and so on. The folders with the
    longest tests come first, so that no process is left alone with one at the end.
    """
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)
    seen: Counter[str] = Counter()
    rare: set[pytest.Item] = set()
    slow_too = _asks_for_slow(config)
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is None or not isinstance(item, pytest.Function):
            continue
        case = _place(item, seen)
        name = item.callspec.id if hasattr(item, "callspec") else ""
        if name in slow.kwargs.get("but", ()) or ("every" in slow.kwargs and case % slow.kwargs["every"] == 0):
            item.own_markers.remove(slow)
            continue
        of = slow.kwargs.get("rare", ())
        if name in of if not isinstance(of, int) else of == 1 or case % of:
            rare.add(item)
    left_out = {item for item in items if item in rare or (not slow_too and item.get_closest_marker("slow"))}
    if _asks_for_rare(config):
        left_out = set()
    seen.clear()
    left_out |= {item for item in items if item not in left_out and _place(item, seen) % config.option.each}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _place(item: pytest.Item, seen: Counter[str]) -> int:
    """How many cases of its test were counted before, in ``seen``, where it is counted, too."""
    name = item.nodeid.partition("[")[0]
    seen[name] += 1
    return seen[name] - 1


def pytest_collection_finish() -> None:
    """What is loaded is no garbage: else each collection, which planning of blocks asks for, would look
    at all of it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> None:
    """Nor is what earlier modules have left, such as PyTorch's caches: collections took half of the time of tests that
    plan blocks.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _asks_for_slow(config):
        terminalreporter.write_line("Tests marked slow were left out; pytest --all runs everything.")
    elif not _asks_for_rare(config):
        terminalreporter.write_line("Rare ones of the slow tests were left out; pytest --all runs everything.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Let all tests search few schedules, but those to which it matters how good a plan is: ``slow(full=True)``."""
    slow = item.get_closest_marker("slow")
    if slow is not None and slow.kwargs.get("full"):
        return (yield)
    with mock.patch.object(searcher, "EVALUATIONS", FEW):
        return (yield)


#: For each test a folder that does not exist yet: most tests need none, and pytest's own take longer than many a test.
_folders = itertools.count()
#: Without a GPU `torch.manual_seed` notes each call and where it came from, for each kind of GPU: milliseconds a test.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _clean(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path_factory.getbasetemp() / f"cache{next(_folders)}"))
    _seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def fake_gpu_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that `fake_gpu.build` compiles."""
    from fake_gpu import build
    from shared import made_once

    if build.missing():
        pytest.skip(build.missing())
    return made_once(tmp_path_factory, "fake_gpu", build.build) / build.RUNTIME


@pytest.fixture(params=["kernel", "twin"])
def impl(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., Any]]:
    """The operator of that name: the compiled kernel or the plain-torch twin."""
    if request.param == "twin":
        return lambda name: ops.operators()[name].reference
    if not ops.available("cpu"):
        pytest.skip(ops.status())
    return lambda name: getattr(torch.ops.monet_like, name)
