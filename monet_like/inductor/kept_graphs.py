"""Plans of joint graphs in the cache folder: the next process with the same graph and budget plans nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

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
from .handed import Handed
from .passes import code_digest
from .planned_graph import PlannedGraph, graph_key
from .portfolio import Way

FORMAT, VERSION = "monet_like compiled graph", 3


@dataclass(frozen=True)
class KeptGraph:
    """A `PlannedGraph` without what its program says.

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
        return KeptGraph(graph.schedule, costs, **_others(graph))

    def planned(self, program: Program) -> PlannedGraph:
        """The plan of a program.

        Raises:
            ScheduleError, LookupError: it is of another one.
        """
        costs = {key: Cost(*cost) for key, cost in self.costs.items()}
        plan = Plan(self.schedule, simulate(program, self.schedule, costs), "feasible", found_by="cache")
        plain = simulate(program, store_all(program), costs)
        return PlannedGraph(program, costs, plan, plain, **_others(self))


def _others(graph: PlannedGraph | KeptGraph) -> dict[str, Any]:
    """What a graph and its file have alike."""
    return {each.name: getattr(graph, each.name) for each in fields(KeptGraph)[2:]}


@dataclass(frozen=True)
class KeptGraphs:
    """A file: the plan of a graph, or its menu."""

    graphs: tuple[KeptGraph, ...]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_with_digest(path, {"format": FORMAT, "version": VERSION, **asdict(self)})


def path_of(handed: Handed, decides: tuple[Any, ...]) -> Path:
    """The file of a graph's plan or menu on its device, with the present settings and versions, and Inductor's.

    Args:
        decides: all else that the content depends on, as plain data.
    """
    device = handed.kernels.joint.device
    inductor = torch._inductor.config.save_config_portable()
    settings = sorted((name, value) for name, value in inductor.items() if not callable(value))
    key = (
        VERSION, code_digest(), graph_key(handed.program), decides, device_name(device), settings_digest(device),
        torch._functorch.config.activation_memory_budget, settings,
    )  # fmt: skip
    return cache_folder() / f"graph_{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"


def find(path: Path, program: Program) -> tuple[PlannedGraph, ...]:
    """What is in a file; nothing if there is none, with a warning where the file is damaged."""
    if not path.exists():
        return ()
    try:
        kept = read_with_digest(path, KeptGraphs, "plan of a graph", FORMAT, VERSION)
        return tuple(graph.planned(program) for graph in kept.graphs)
    except (ScheduleFileError, ScheduleError, LookupError) as error:
        warn_caller(f"a compiled graph is planned anew: {error}")
        return ()


def keep_graphs(path: Path, graphs: Sequence[PlannedGraph]) -> None:
    """Keep a plan or a menu, unless its search was interrupted."""
    if not any(graph.plan.interrupted for graph in graphs):
        keep(KeptGraphs(tuple(map(KeptGraph.of, graphs))), path)
