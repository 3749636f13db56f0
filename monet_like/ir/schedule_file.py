"""Schedule files: a schedule, the problem it solves and its predicted peak and time, as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleFileError
from ..files import read_bytes
from .frames import frame
from .json_fields import read_as, write_lines
from .schedule import Schedule
from .units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

FORMAT = "monet_like schedule"
#: 4: the fingerprint knows arguments, and no names but those of parameters, buffers and inputs.
VERSION = 4

#: Solver of a record whose step is plain PyTorch's own, since no schedule fits where it does.
PLAIN = "plain PyTorch"


@dataclass(frozen=True)
class InputSpec:
    """Description of a tensor among the model's flattened arguments.

    Attributes:
        shape: with the batch.
        dtype: such as ``float32``.
        requires_grad: whether its gradient is wanted.
        layout: ``channels_last`` or ``channels_last_3d``, or "" for every other one.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    layout: str = ""


@dataclass(frozen=True)
class ScheduleRecord:
    """The content of a schedule file: a schedule, what it was made for and what it promises.

    Attributes:
        schedule: the tasks to run.
        model: the expression it was solved for, or the class name.
        inputs: the tensors it was solved for.
        mode: the mode string: which variants the program has.
        ablation: operator choice only, no recompute.
        budget_bytes: of the whole training step.
        optimizer, optimizer_bytes: whose state is counted, and how much that is.
        cublas_bytes: bytes counted for cuBLAS's workspaces (`monet_like.profile.cublas`); 0 in files without this
            field.
        device, versions: of the profile's measurement.
        fingerprint: of the program (`Program.fingerprint`).
        autocast: the autocast dtype the model was captured under, or "".
        layout: of the model's weights, as `InputSpec.layout`.
        optimizer_in_backward: hooks step and free each gradient in the backward.
        attention: the kind of attention that the program has and the replay pins (flash, efficient, cudnn, math); "":
            what PyTorch chooses there.
        made_last: names of the parameters whose gradients are made after all others.
        peak_bytes, seconds: predicted for this schedule; no ``peak_bytes``: nothing is promised.
        device_seconds: of ``seconds``, those in which a GPU works; 0: not known, or there is none.
        plain_peak_bytes, plain_seconds: predicted for plain PyTorch.
        solver, status, bound_seconds, gap, solve_seconds: how it was found; ``bound_seconds`` and ``gap`` are
            None where nothing is proven.
        bound_kind: for which schedules the bound holds, see `Plan`.
        note: about the profile: at which batch it was measured.
        counts: of the program and the plan, such as ``parameters``, ``slots`` and ``processes``.
        run_bytes: predicted memory while each task runs, in the order of the schedule; none: not known.
        offloaded: of a block's schedule: values that are on the host between its forward and its backward.
    """

    schedule: Schedule
    model: str
    inputs: tuple[InputSpec, ...]
    mode: str
    budget_bytes: int
    fingerprint: str
    device: str
    versions: dict[str, str]
    peak_bytes: int
    seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    solver: str
    status: str
    bound_seconds: float | None = None
    gap: float | None = None
    bound_kind: str = "none"
    solve_seconds: float = 0.0
    ablation: bool = False
    optimizer: str = "none"
    optimizer_bytes: int = 0
    autocast: str = ""
    layout: str = ""
    made_last: tuple[str, ...] = ()
    note: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    cublas_bytes: int = 0
    optimizer_in_backward: bool = False
    attention: str = ""
    run_bytes: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    device_seconds: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the step is plain PyTorch's own: the model runs as it is."""
        return self.solver == PLAIN

    def __repr__(self) -> str:
        inputs = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in self.inputs)
        return (
            f"ScheduleRecord({self.model}, {inputs}, {self.mode}: {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)}, step {format_seconds(self.seconds)} predicted for {self.device})"
        )

    @property
    def extra_bytes(self) -> int:
        """Resident memory beyond the program's: the optimizer's state and cuBLAS's workspaces."""
        return self.optimizer_bytes + self.cublas_bytes

    def to_frame(self) -> pandas.DataFrame:
        """One row: what the schedule was made for and what it promises. ``pandas.concat`` compares several."""
        left_out = ("schedule", "made_last", "versions", "counts", "run_bytes", "offloaded")
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        own["inputs"] = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in self.inputs)
        dtypes = {"bound_seconds": "float64", "gap": "float64"}
        kinds = {int: "int64", float: "float64", bool: "bool"}
        columns = {name: dtypes.get(name) or kinds.get(type(value), "object") for name, value in own.items()}
        return frame(columns, [tuple(own.values())])

    def save(self, path: Path) -> None:
        """Write the file, one line per field, whole or not at all."""
        write_lines(path, self.content())

    def content(self) -> dict[str, Any]:
        """Everything that the file holds, as plain builtins."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content |= content.pop("schedule")
        for name in _IF_THERE:  # files without it read the same
            if not content[name]:
                del content[name]
        return content

    @staticmethod
    def load(path: Path) -> ScheduleRecord:
        """Read a file.

        Raises:
            ScheduleFileError: missing, truncated, of another format or version, or with a wrong field.
        """
        try:
            content = json.loads(read_bytes(path, "schedule"))
        except (ValueError, RecursionError) as error:  # the latter: nested too deeply
            raise ScheduleFileError(
                f"{path} is not a schedule file, or is damaged (no JSON: {error}); solve again"
            ) from None
        return ScheduleRecord.of_content(content, str(path))

    @staticmethod
    def of_content(content: Any, path: str) -> ScheduleRecord:
        """A schedule from what `content` returns, every field of it checked.

        Args:
            path: where it is from, for people.

        Raises:
            ScheduleFileError: of another format or version, or with a wrong field.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ScheduleFileError(f"{path} is not a schedule file of monet_like; make one with solve.py")
        version = content.get("version")
        if type(version) is not int or version != VERSION:
            found = version if type(version) is int else f"of type {type(version).__name__}"
            age = "an earlier" if type(version) is int and version < VERSION else "another"
            raise ScheduleFileError(
                f"{path} was made by {age} version of monet_like: it has format version {found}, this one reads "
                f"{VERSION}; solve again"
            )
        for name in (*_SCHEDULE, *(f.name for f in fields(ScheduleRecord) if f.name not in _LATER)):
            if name not in content:
                raise ScheduleFileError(f"{path} is damaged: it has no field {name!r}; solve again")
        try:
            schedule = {name: content[name] for name in _SCHEDULE}
            record = read_as({**content, "schedule": schedule}, ScheduleRecord)
            if any(f.name not in entry for entry in content["inputs"] for f in fields(InputSpec)):
                raise ValueError("an input lacks a field")
            if any(math.prod(max(extent, 1) for extent in i.shape) >= _MOST_ELEMENTS for i in record.inputs):
                raise ValueError("an input has more elements than a tensor can have")
        except ValueError as error:
            raise ScheduleFileError(f"{path} is damaged: {error}; solve again") from None
        return record


#: Elements of an input: more, PyTorch cannot count the bytes of.
_MOST_ELEMENTS = 2**53

#: Fields of the schedule, which stand among the others.
_SCHEDULE = ("forward", "again", "ways")
#: Fields that are left out of a file where they say nothing.
_IF_THERE = ("optimizer_in_backward", "attention", "run_bytes", "offloaded", "device_seconds")
#: Fields that files of this format did not always have, and the schedule itself.
_LATER = ("schedule", "made_last", "cublas_bytes", *_IF_THERE)
