"""Plans of joint graphs in the cache folder: the next process with the same graph and budget plans nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..compiler.sources import keep
from ..errors import ScheduleError, ScheduleFileError, warn_caller
from ..files import cache_folder
from ..ir.json_fields import read_with_digest, write_with_digest
from ..ir.program import Cost, Program
from ..ir.schedule import Schedule
from ..ir.simulate import simulate
from ..plan import store_all
from ..plan.result import Plan
from ..profile.devices import device_name
from ..profile.settings import settings_digest
from .passes import code_digest
from .planned_graph import PlannedGraph, graph_key
from .portfolio import Way

FORMAT, VERSION = "monet_like compiled graph", 2

Kept = TypeVar("Kept")
Made = TypeVar("Made")


@dataclass(frozen=True)
class KeptGraph:
    """The content of a file: a `PlannedGraph` without what its program says.

    Attributes:
        costs: seconds and workspace bytes of kernels.
    """

    schedule: Schedule
    costs: dict[str, tuple[float, int]]
    budget_bytes: int
    step_bytes: int
    saved: tuple[str, ...]
    saved_bytes: int
    movable: tuple[int, ...]
    fused_within: int | None
    way: Way | None

    @staticmethod
    def of(graph: PlannedGraph) -> KeptGraph:
        """That of a plan."""
        costs = {key: (cost.seconds, cost.workspace_bytes) for key, cost in graph.costs.items()}
        return KeptGraph(
            graph.schedule, costs, graph.budget_bytes, graph.step_bytes, graph.saved, graph.saved_bytes,
            graph.movable, graph.fused_within, graph.way,
        )  # fmt: skip

    def planned(self, program: Program) -> PlannedGraph:
        """The plan of a program.

        Raises:
            ScheduleError, LookupError: it is of another one.
        """
        costs = {key: Cost(*cost) for key, cost in self.costs.items()}
        plan = Plan(self.schedule, simulate(program, self.schedule, costs), "feasible", found_by="cache")
        plain = simulate(program, store_all(program), costs)
        return PlannedGraph(
            program, costs, plan, plain, self.budget_bytes, self.saved, self.saved_bytes, self.movable,
            step_bytes=self.step_bytes, fused_within=self.fused_within, way=self.way,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_with_digest(path, {"format": FORMAT, "version": VERSION, **asdict(self)})


def path_of(program: Program, device: torch.device, decides: tuple[Any, ...]) -> Path:
    """The file of a graph's plan on a device, with its present settings and versions, and Inductor's.

    Args:
        decides: all else that the plan depends on, as plain data.
    """
    inductor = torch._inductor.config.save_config_portable()
    settings = sorted((name, value) for name, value in inductor.items() if not callable(value))
    key = (
        VERSION, code_digest(), graph_key(program), decides, device_name(device), settings_digest(device),
        torch._functorch.config.activation_memory_budget, settings,
    )  # fmt: skip
    return cache_folder() / f"graph_{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"


def find(path: Path, program: Program) -> PlannedGraph | None:
    """The plan in a file; None if there is none, with a warning where the file is damaged."""
    return _found(path, KeptGraph, lambda kept: kept.planned(program))


def _found(path: Path, kind: type[Kept], planned: Callable[[Kept], Made]) -> Made | None:
    if not path.exists():
        return None
    try:
        return planned(read_with_digest(path, kind, "plan of a graph", FORMAT, VERSION))
    except (ScheduleFileError, ScheduleError, LookupError) as error:
        warn_caller(f"a compiled graph is planned anew: {error}")
        return None


def keep_graph(path: Path, graph: PlannedGraph) -> None:
    """Keep a plan, unless its search was interrupted."""
    if not graph.plan.interrupted:
        keep(KeptGraph.of(graph), path)


@dataclass(frozen=True)
class KeptMenu:
    """The menu of a graph in a file."""

    graphs: tuple[KeptGraph, ...]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_with_digest(path, {"format": FORMAT, "version": VERSION, **asdict(self)})


def find_menu(path: Path, program: Program) -> tuple[PlannedGraph, ...] | None:
    """The menu in a file; None if there is none, with a warning where the file is damaged."""
    return _found(path, KeptMenu, lambda kept: tuple(graph.planned(program) for graph in kept.graphs))


def keep_menu(path: Path, graphs: Sequence[PlannedGraph]) -> None:
    """Keep a menu."""
    keep(KeptMenu(tuple(map(KeptGraph.of, graphs))), path)
