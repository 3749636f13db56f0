"""Files of checkpoint policies: which calls of operators are saved, as JSON. Nothing in them can run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ScheduleFileError
from ..files import write_atomically
from ..ir.json_fields import headed, read_as, read_headed

FORMAT = "monet_like checkpoint policy"
VERSION = 1


@dataclass(frozen=True, slots=True)
class RegionDecisions:
    """The decisions for one checkpointed region.

    Attributes:
        module: qualified name; "" for the whole model.
        operators: every call that PyTorch asks about, in order: the operator, and whether its results are saved.
        saved_bytes: of the results that are saved, without rounding up.
        in_place: a saved result is changed in place by operators that are saved with it.
    """

    module: str
    operators: tuple[tuple[str, bool], ...]
    saved_bytes: int
    in_place: bool = False


@dataclass(frozen=True)
class Predictions:
    """What is predicted of a plan for a mechanism of checkpointing, beside the full plan.

    Attributes:
        model, device, budget_bytes: as those of the full plan.
        peak_bytes, seconds: predicted for a step with these decisions.
        bound_seconds: no choice of this mechanism is faster.
        full_peak_bytes, full_seconds: predicted for the full plan.
        plain_peak_bytes, plain_seconds: predicted for plain PyTorch.
    """

    model: str
    device: str
    budget_bytes: int
    peak_bytes: int
    seconds: float
    bound_seconds: float
    full_peak_bytes: int
    full_seconds: float
    plain_peak_bytes: int
    plain_seconds: float


@dataclass(frozen=True)
class SelectivePlan(Predictions):
    """The decisions for all regions of a model, and what is predicted.

    Attributes:
        regions: in the order in which a step calls them.
    """

    regions: tuple[RegionDecisions, ...]

    def content(self) -> dict[str, Any]:
        """The content of the file, as builtins.

        Each call has its operator, its number among the calls of that operator, and a word.
        """
        regions = []
        for region in self.regions:
            counts: Counter[str] = Counter()
            calls = []
            for op, saved in region.operators:
                calls.append([op, counts[op], "save" if saved else "recompute"])
                counts[op] += 1
            regions.append(
                {
                    "module": region.module,
                    "saved_bytes": region.saved_bytes,
                    "in_place": region.in_place,
                    "operators": calls,
                }
            )
        return {**headed(self, FORMAT, VERSION, without="regions"), "regions": regions}


def write_policy(plan: SelectivePlan, path: Path) -> None:
    """Write a plan as JSON, one line for each call.

    Raises:
        UsageError: it cannot be written.
    """
    content = plan.content()
    regions = content.pop("regions")
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
    parts = []
    for region in regions:
        calls = region.pop("operators")
        own = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in region.items()]
        own.append('  "operators": [\n' + ",\n".join(f"    {json.dumps(call)}" for call in calls) + "\n  ]")
        parts.append(" {\n" + ",\n".join(own) + "\n }")
    lines.append('"regions": [\n' + ",\n".join(parts) + "\n]")
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_policy(path: Path) -> SelectivePlan:
    """Read a file that `write_policy` has written.

    Raises:
        ScheduleFileError: it is unreadable or none of these.
    """
    content = read_headed(path, "checkpoint policy", FORMAT, (VERSION,), "write it again")
    try:
        regions = [{**entry, "operators": _calls(entry["operators"])} for entry in content["regions"]]
        if not regions:
            raise ValueError("it has no regions")
        return read_as({**content, "regions": regions}, SelectivePlan)
    except (ValueError, KeyError, TypeError) as error:
        raise ScheduleFileError(f"{path} is no checkpoint policy of monet_like: {error}; write it again") from error


def _calls(entries: Any) -> list[tuple[str, bool]]:
    """The operators of a region, and whether their results are saved."""
    calls = []
    counts: Counter[str] = Counter()
    for op, number, word in read_as(entries, list[tuple[str, int, Literal["save", "recompute"]]]):
        if number != counts[op]:
            raise ValueError(f"call {number} of {op} stands where call {counts[op]} should")
        counts[op] += 1
        calls.append((op, word == "save"))
    return calls
