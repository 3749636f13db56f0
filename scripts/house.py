"""Counts the package's modules and imports: python scripts/house.py

An arrow leads from a module to one that it imports, wherever the import stands: at the top, in a function or for types
only. A box is a module at the package's root, or a folder; its floor is one more than the highest floor that it
imports.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "monet_like"

#: Boxes from the lowest on; those of one line import none of each other. A box imports only from lines above its own.
ORDER = (
    ("errors",),
    ("interrupts", "_version", "torch_versions"),
    ("files",),
    ("toolchain", "ir"),
    ("build",),
    ("ops", "solvers"),
    ("runtime", "nn", "plan"),
    ("capture",),
    ("variants", "profile", "models"),
    ("compiler",),
    ("zoo",),
    ("inductor",),
    ("replay",),
    ("report", "testing"),
    ("export", "job"),
    ("auto",),
    ("cli", "integrations"),
    ("__init__", "__main__"),
)


def modules(root: Path = ROOT) -> dict[str, Path]:
    """The file of every module, by its name without the package's; ``""`` is the package itself."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows(root: Path = ROOT) -> nx.DiGraph:
    """The graph of imports between modules of the package; names as those of `modules`."""
    files = modules(root)
    graph = nx.DiGraph()
    graph.add_nodes_from(files)
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in _imports(path.read_text()):
            for target in _imported(node, package):
                # ``from .capture import tracing`` names a module, ``from .capture import capture`` a function of one
                module = target if target in files else target.rpartition(".")[0]
                if module in files and module != name:
                    graph.add_edge(name, module)
    return graph


@functools.cache
def _imports(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The imports of a module, wherever they stand."""
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom))


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """What a statement imports of the package, without the package's name."""
    if isinstance(node, ast.Import):
        return [alias.name.removeprefix(f"{PACKAGE}.") for alias in node.names if alias.name.startswith(f"{PACKAGE}.")]
    if node.level:
        parts = package.split(".") if package else []
        base = parts[: len(parts) - (node.level - 1)] + ([node.module] if node.module else [])
    elif node.module and node.module.partition(".")[0] == PACKAGE:
        base = node.module.split(".")[1:]
    else:
        return []
    return [".".join([*base, alias.name]) for alias in node.names]


def libraries(path: Path) -> set[str]:
    """The packages that a module imports by their names, wherever the import stands."""
    found: set[str] = set()
    for node in _imports(path.read_text()):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def box(module: str) -> str:
    """The box that a module stands in."""
    return module.partition(".")[0] or "__init__"


def boxes(graph: nx.DiGraph) -> nx.DiGraph:
    """The graph of imports between boxes."""
    found = nx.DiGraph()
    found.add_nodes_from(map(box, graph))
    found.add_edges_from((box(one), box(other)) for one, other in graph.edges if box(one) != box(other))
    return found


def circles(graph: nx.DiGraph) -> list[list[str]]:
    """Modules that import each other, directly or by others."""
    return [sorted(names) for names in nx.strongly_connected_components(graph) if len(names) > 1]


def upward(graph: nx.DiGraph) -> list[tuple[str, str]]:
    """Imports against `ORDER`, from one box to another on the same line or below."""
    line = {name: number for number, names in enumerate(ORDER) for name in names}
    return sorted((a, b) for a, b in graph.edges if box(a) != box(b) and line[box(b)] >= line[box(a)])


def floors(graph: nx.DiGraph) -> int:
    """How many boxes the longest chain of imports leads through; circles count as one box."""
    return nx.dag_longest_path_length(nx.condensation(boxes(graph))) + 1


def main() -> None:
    """Print the figures."""
    files, graph = modules(), arrows()
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    long = {name: count for name, count in lines.items() if count > 400}
    print(f"modules at the root {sum('.' not in name and path.parent.name == PACKAGE for name, path in files.items())}")
    print(f"boxes {len(boxes(graph))}, arrows between them {boxes(graph).number_of_edges()}, floors {floors(graph)}")
    print(f"circles {len(circles(graph))}, arrows against the order {len(upward(graph))}")
    print(
        f"files over 400 lines {len(long)}: "
        f"{', '.join(f'{n} {c}' for n, c in sorted(long.items(), key=lambda x: -x[1]))}"
    )
    print(f"modules {len(files)}, lines {sum(lines.values())}")


if __name__ == "__main__":
    main()
