"""The planner's modules import only modules that stand before them, and of other packages only plain data and files."""

from __future__ import annotations

import networkx as nx

from scripts import house

#: In order: a module imports only from its own layer and those before it.
LAYERS = (
    ("solvers",),
    ("plan.result", "plan.analysis"),
    ("plan.subprogram", "plan.baseline"),
    ("plan.offload",),
    ("plan.local_search",),
    ("plan.ilp",),
    ("plan.strategies",),
    ("plan",),
    ("plan.budgets",),
    ("plan.block_points", "plan.blocks"),
)
OUTSIDE = {"ir", "build", "errors", "files", "interrupts"}


ARROWS = house.arrows()
MODULES = {name for name in ARROWS if house.box(name) in ("plan", "solvers")}


def layer(name: str) -> int:
    """The layer whose prefix fits best."""
    fitting = [
        (len(prefix), k) for k, some in enumerate(LAYERS) for prefix in some if f"{name}.".startswith(f"{prefix}.")
    ]
    return max(fitting)[1]


def test_planner_modules_import_only_what_stands_before_them() -> None:
    assert len(MODULES) > 30
    for name, other in ARROWS.out_edges(MODULES):
        if other in MODULES:
            assert layer(other) <= layer(name), f"{name} imports {other}"
        else:
            assert house.box(other) in OUTSIDE, f"{name} imports {other}"
    for name, path in house.modules().items():
        assert name not in MODULES or house.libraries(path).isdisjoint({"torch", "monet_like"}), name


def test_planner_modules_import_each_other_in_no_circle() -> None:
    assert nx.is_directed_acyclic_graph(ARROWS.subgraph(MODULES))
