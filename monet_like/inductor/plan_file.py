"""Plans of ``torch.compile`` made in advance: found without generating code, and kept as JSON.

Nothing in a file can run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..ir.json_fields import headed, read_file_as
from ..ir.schedule import Schedule
from .planned_graph import PlannedGraph, graph_key

FORMAT, VERSION = "monet_like compile plan", 1


@dataclass(frozen=True)
class GraphDecisions:
    """The plan of one joint graph.

    Attributes:
        key: of the graph; a graph with another one has another plan.
        budget_bytes, peak_bytes, seconds: of one call.
        plain_peak_bytes, plain_seconds: with everything kept that the backward reads.
        saved: names of the nodes that the forward hands to the backward, inputs apart.
        recomputed: for every recomputation the node and the node of the backward before which it runs.
        forward, again, ways: the schedule, as in a schedule file.
    """

    key: str
    budget_bytes: int
    peak_bytes: int
    seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    saved: tuple[str, ...]
    recomputed: tuple[tuple[str, ...], ...]
    forward: tuple[int, ...]
    again: tuple[tuple[int, ...], ...]
    ways: tuple[int, ...]

    @staticmethod
    def of(graph: PlannedGraph) -> GraphDecisions:
        """The decisions of a plan."""
        program, schedule = graph.program, graph.schedule
        names = [slot[way].name for slot, way in zip(program.slots, schedule.ways, strict=True)]
        again = [(program.tasks[p].name, names[k]) for k, runs in enumerate(schedule.again) for p in runs]
        return GraphDecisions(
            graph_key(program), graph.budget_bytes, graph.peak_bytes, graph.plan.report.seconds, graph.plain.peak_bytes,
            graph.plain.seconds, graph.saved, tuple(again), schedule.forward, schedule.again, schedule.ways,
        )  # fmt: skip

    @property
    def schedule(self) -> Schedule:
        """The schedule of the graph."""
        return Schedule(self.forward, self.again, self.ways)


@dataclass(frozen=True)
class CompilePlan:
    """Plans of all graphs of a model.

    Attributes:
        model, device: as in the schedule file.
        budget_bytes, extra_bytes: as given to `monet_like.compile_options`.
        graphs: in the order in which they are compiled.
    """

    model: str
    device: str
    budget_bytes: int
    extra_bytes: int
    graphs: tuple[GraphDecisions, ...]

    def content(self) -> dict[str, Any]:
        """The content of the file, as builtins."""
        return {**headed(self, FORMAT, VERSION, without="graphs"), "graphs": [vars(graph) for graph in self.graphs]}

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            UsageError: it cannot be written.
        """
        write_atomically(path, (json.dumps(self.content(), indent=1) + "\n").encode())


def read_plan(path: Path) -> CompilePlan:
    """Read a file that `CompilePlan.write` has written.

    Raises:
        ScheduleFileError: it is unreadable or none of these.
    """
    return read_file_as(path, CompilePlan, "compile plan", FORMAT, VERSION, "export it again")
