"""The planner's modules import only modules that stand before them, and neither torch nor other stages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from planning import ROOT

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
)
OUTSIDE = {"ir", "build", "units", "errors", "files", "interrupts"}


def modules() -> dict[str, Path]:
    package = ROOT / "monet_like"
    found = {}
    for folder in ("plan", "solvers"):
        for path in (package / folder).rglob("*.py"):
            found[".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """What a module imports of the package, functions' imports included, without the package's name."""
    here = [*name.split("."), *(["__init__"] if MODULES[name].name == "__init__.py" else [])]
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (f"/{alias.name.split('.')[0]}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield f"/{(node.module or '').split('.')[0]}"
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level], *(node.module or "").split(".")]
            target = ".".join(part for part in base if part)
            yield from (f"{target}.{a.name}" if f"{target}.{a.name}" in MODULES else target for a in node.names)


def layer(name: str) -> int:
    """The layer whose prefix fits best."""
    fitting = [
        (len(prefix), k) for k, some in enumerate(LAYERS) for prefix in some if f"{name}.".startswith(f"{prefix}.")
    ]
    return max(fitting)[1]


def test_planner_modules_import_only_what_stands_before_them() -> None:
    assert len(MODULES) > 30
    for name in MODULES:
        for other in imports(name):
            if other in MODULES:
                assert layer(other) <= layer(name), f"{name} imports {other}"
            else:
                assert other.startswith("/") or other.split(".")[0] in OUTSIDE, f"{name} imports {other}"
                assert other not in ("/torch", "/monet_like"), f"{name} imports {other}"


def test_planner_modules_import_each_other_in_no_circle() -> None:
    graph = {name: {other for other in imports(name) if other in MODULES and other != name} for name in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)
