"""The planner's modules import only modules that stand before them, and of other packages only plain data and files."""

from __future__ import annotations

import networkx as nx
import pytest

from scripts import house

#: In order: a module imports only from its own layer and those before it.
LAYERS = (
    ("solvers",),
    ("plan.result", "plan.analysis", "plan.instance"),
    ("plan.rows",),
    ("plan.subprogram", "plan.baseline"),
    ("plan.offload",),
    ("plan.local_search", "plan.bound"),
    ("plan.ilp",),
    ("plan.strategies",),
    ("plan",),
    ("plan.budgets",),
    ("plan.step",),
)
OUTSIDE = {"ir", "build", "errors", "files", "interrupts"}


@pytest.fixture(scope="module")
def arrows() -> nx.DiGraph:
    return house.arrows()


@pytest.fixture
def modules(arrows: nx.DiGraph) -> set[str]:
    """The planner's."""
    return {name for name in arrows if house.box(name) in ("plan", "solvers")}


def layer(name: str) -> int:
    """The layer whose prefix fits best."""
    fitting = [
        (len(prefix), k) for k, some in enumerate(LAYERS) for prefix in some if f"{name}.".startswith(f"{prefix}.")
    ]
    return max(fitting)[1]


def test_planner_modules_import_only_what_stands_before_them(arrows: nx.DiGraph, modules: set[str]) -> None:
    assert len(modules) > 30
    for name, other in arrows.out_edges(modules):
        if other in modules:
            assert layer(other) <= layer(name), f"{name} imports {other}"
        else:
            assert house.box(other) in OUTSIDE, f"{name} imports {other}"
    for name, path in house.modules().items():
        assert name not in modules or house.libraries(path).isdisjoint({"torch", "monet_like"}), name
