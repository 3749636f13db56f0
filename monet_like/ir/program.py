"""Program: one training step as values (pieces of storage) and tasks (operator calls).

A **value** is a piece of storage. A **task** reads values and writes values. The forward is a list of
tasks in execution order, of which any subset may be run, now or again later; a value may be written by
several of them (a batch norm and its cheaper recompute). The backward is a list of **slots** in autograd
order; every slot is done once, in one of its **ways**, each a task that may read other forward values.

Everything a planner may do is a choice among these tasks: keeping, recomputing, repacking and choosing an
operator's implementation are not different mechanisms. This module is plain data: it imports neither torch
nor a solver, so a program can be planned, simulated and tested anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ..errors import MonetError
from .frames import frame
from .units import format_bytes

if TYPE_CHECKING:
    import pandas

ValueKind = Literal["parameter", "buffer", "input", "forward", "backward"]
Runs = Literal["both", "first", "again"]
Copies = Literal["", "whole", "start", "end"]

_TASK_COLUMNS = {
    "stage": "object", "slot": "Int64", "way": "Int64", "task": "object", "variant": "object", "mode_word": "object",
    "runs": "object", "reads": "object", "writes": "object", "written_bytes": "int64", "cost": "object",
}  # fmt: skip
_VALUE_COLUMNS = {
    "value": "int64", "name": "object", "kind": "object", "tensor": "object", "bytes": "int64", "host_bytes": "int64",
}  # fmt: skip

#: Kinds whose storage exists during the whole step, whatever the schedule does.
RESIDENT_KINDS = frozenset({"parameter", "buffer", "input"})


@dataclass(frozen=True, slots=True)
class Value:
    """A value: a piece of storage.

    Attributes:
        name: unique within the program.
        bytes: size of the storage as the device's allocator counts it.
        kind: ``parameter``, ``buffer`` and ``input`` are resident throughout; ``forward`` values are written
            by forward tasks, ``backward`` values (gradients) by slots.
        spec: dtype, shape and, where they are not row-major, strides, such as ``float32[184, 64, 112, 112]``.
        host_bytes: memory on the host, which no budget counts.
    """

    name: str
    bytes: int
    kind: ValueKind
    spec: str = ""
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument of a `Call`: a value's own tensor (an ``int``) or a temporary of the task (a ``str``)."""

    name: int | str


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call of a task.

    Attributes:
        op: an operator's qualified name, such as ``aten.convolution.default``.
        args, kwargs: literals, and `Ref` for tensors, in tuples or lists.
        outs: where the results go: one `Ref`, or one per result (None: not wanted) when ``unpack``.
        unpack: the operator returns a tuple that is taken apart.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[Ref | None, ...]
    unpack: bool = False


def refs(call: Call) -> Iterator[Ref]:
    """The refs among a call's arguments, nested ones included."""
    pending: list[Any] = [*call.args, *(value for _, value in call.kwargs)]
    while pending:
        item = pending.pop(0)
        if isinstance(item, Ref):
            yield item
        elif isinstance(item, tuple | list):
            pending[:0] = item


@dataclass(frozen=True, slots=True)
class Task:
    """A task: operator calls that read values and write values.

    Attributes:
        name: for people; unique within the program.
        reads, writes: value indices. Resident values may be read; only forward values are written by
            forward tasks, only backward values by slots.
        cost: key of this task's `Cost` in the profile; "" costs nothing.
        variant: which implementation this is; ``aten`` is PyTorch's own.
        word: the mode word that admits it (``conv``, ``multiway``, ``newnode``, ``inplace``, ``offload``,
            ``algorithms``); "" always.
        overwrites: a value among ``reads`` whose storage becomes that of ``writes[0]``, or is released on the
            way and counts for it. After the task that value no longer exists. A slot may take over a forward value;
            planners choose such a way only if no later stage can use the value.
        runs: ``first`` only in the forward, ``again`` only during the backward, or ``both``.
        copies: a copy from or to the host, on the copy engine: ``whole``: the next task waits for it; ``start``: it
            runs beside what follows, and who reads what it writes waits; ``end``: the reader that is there for that.
        calls: the operator calls, in order. Planners never look at them.
        run_bytes: of a task in a schedule's step: predicted memory while it runs, for people; None: not known.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost: str = ""
    variant: str = "aten"
    word: str = ""
    overwrites: int | None = None
    runs: Runs = "both"
    copies: Copies = ""
    calls: tuple[Call, ...] = ()
    run_bytes: int | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Cost:
    """Time and workspace of one run of a task.

    Attributes:
        seconds: time.
        workspace_bytes: peak of what the task allocates beyond the values it writes. (A task that
            overwrites a value allocates nothing for ``writes[0]``; that is not part of the workspace.)
    """

    seconds: float
    workspace_bytes: int = 0


FREE = Cost(0.0, 0)
#: Of a task that cannot run on the device, or that nothing is known of: no plan takes it.
REFUSED = Cost(float("inf"), 0)


@dataclass(frozen=True)
class Program:
    """A training step: its values, forward tasks and backward slots.

    Attributes:
        values: all values; tasks refer to them by index.
        tasks: forward tasks in the only order in which they may run within one stage. Producers of a value
            stand before all its readers that may run in the same stage.
        slots: the backward, in order; each slot is the tuple of its ways. All ways of a slot read and write
            the same backward values; they may read different forward values.
        outputs: forward values that must exist at the end of the forward and then stay to the end of the
            step, because the caller holds them. Side effects (batch-norm statistics) are outputs of 0 bytes.
        tangents: backward values that exist when the backward starts; each is read by some slot.
        gradients: backward values that stay to the end of the step once written: the gradients that end up in
            ``.grad``.
    """

    values: tuple[Value, ...]
    tasks: tuple[Task, ...]
    slots: tuple[tuple[Task, ...], ...]
    outputs: tuple[int, ...]
    tangents: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()

    def __repr__(self) -> str:
        count, held = self.parameters
        return (
            f"Program({len(self.values)} values, {len(self.tasks)} forward tasks, {len(self.slots)} backward slots, "
            f"{count} parameters in {format_bytes(held)})"
        )

    def to_frame(self) -> pandas.DataFrame:
        """One row per task: the forward's in order, then the ways of every backward slot.

        ``slot`` and ``way`` are missing in the forward; ``reads`` and ``writes`` are names of values, ``written_bytes``
        is the memory of the latter, and ``cost`` the task's name in the profile.
        """

        def names(values: tuple[int, ...]) -> str:
            return ", ".join(self.values[v].name for v in values)

        tasks: list[tuple[str, int | None, int | None, Task]] = [("forward", None, None, task) for task in self.tasks]
        tasks += [("backward", k, w, task) for k, slot in enumerate(self.slots) for w, task in enumerate(slot)]
        rows = (
            (
                stage, slot, way, task.name, task.variant, task.word, task.runs, names(task.reads), names(task.writes),
                sum(self.values[v].bytes for v in task.writes), task.cost,
            )
            for stage, slot, way, task in tasks
        )  # fmt: skip
        return frame(_TASK_COLUMNS, rows)

    def values_to_frame(self) -> pandas.DataFrame:
        """One row per value; ``value`` is the number by which tasks refer to it."""
        rows = (
            (v, value.name, value.kind, value.spec, value.bytes, value.host_bytes)
            for v, value in enumerate(self.values)
        )
        return frame(_VALUE_COLUMNS, rows)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers and inputs."""
        return sum(value.bytes for value in self.values if value.kind in RESIDENT_KINDS)

    @cached_property
    def parameters(self) -> tuple[int, int]:
        """Number of parameters and their bytes."""
        found = [value.bytes for value in self.values if value.kind == "parameter"]
        return len(found), sum(found)

    @property
    def residents(self) -> int:
        """Number of parameters and buffers."""
        return sum(value.kind in ("parameter", "buffer") for value in self.values)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(value.bytes for value in self.values if value.kind == "buffer")

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """For every value, the forward tasks that write it, in order."""
        found: list[list[int]] = [[] for _ in self.values]
        for index, task in enumerate(self.tasks):
            for value in task.writes:
                found[value].append(index)
        return tuple(map(tuple, found))

    def forward_reads(self, task: Task) -> tuple[int, ...]:
        """The forward values that a task reads: they must be kept or recomputed."""
        return tuple(v for v in task.reads if self.values[v].kind == "forward")

    @cached_property
    def slot_reads(self) -> tuple[bool, ...]:
        """For every slot, whether any way reads a forward value."""
        return tuple(any(self.forward_reads(way) for way in slot) for slot in self.slots)

    def every_task(self) -> tuple[Task, ...]:
        """Forward tasks and the ways of all slots."""
        return (*self.tasks, *(way for slot in self.slots for way in slot))

    def restrict(self, words: frozenset[str], *, rerun: bool = True) -> Program:
        """The program with only the variants that ``words`` admit; without ``rerun``, nothing may be recomputed."""
        tasks = tuple(
            replace(task, runs="first") if not rerun and task.runs == "both" else task
            for task in self.tasks
            if (not task.word or task.word in words) and (rerun or task.runs != "again")
        )
        slots = tuple(tuple(way for way in slot if not way.word or way.word in words) for slot in self.slots)
        return replace(self, tasks=tasks, slots=slots)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the values, the tasks, their operators and arguments, and over parameters' names and layouts.

        Values, tasks and temporaries count by their place in the order, not by name: names differ between captures on
        two devices. Sizes of activations are not in it, so it is equal for the same model at another batch; of the
        numbers among arguments only those that no size changes are (`_NUMBERS`).
        """
        digest = hashlib.sha256()
        tangents = frozenset(self.tangents)
        for index, value in enumerate(self.values):
            name = value.name if value.kind in RESIDENT_KINDS or index in tangents else ""
            own = value.spec if value.kind in ("parameter", "buffer") else ""
            digest.update(f"{name}:{value.kind}:{own};".encode())
        for group in (self.tasks, *self.slots):
            for task in group:
                calls = ",".join(_described(task))
                digest.update(
                    f"{task.reads}|{task.writes}|{task.variant}|{task.overwrites}|{task.runs}|{calls};".encode()
                )
            digest.update(b"/")
        digest.update(f"{self.outputs}{self.tangents}{self.gradients}".encode())
        return digest.hexdigest()

    def check(self) -> None:
        """Verify the invariants that planners rely on.

        Raises:
            MonetError: with the first broken rule. Only a bug in this package, or a hand-made program, can cause it.
        """
        for task in self.tasks:
            for value in task.writes:
                _require(self.values[value].kind == "forward", task, f"writes {value}, which is no forward value")
        for index, task in enumerate(self.tasks):
            for value in task.reads:
                kind = self.values[value].kind
                _require(kind != "backward", task, f"is a forward task and reads gradient {self.values[value].name}")
                if kind == "forward":
                    makers = self.producers[value]
                    _require(bool(makers), task, f"reads {self.values[value].name}, which no task writes")
                    late = any(p >= index and may_meet(self.tasks[p], task) for p in makers)
                    _require(not late, task, f"stands before a producer of {self.values[value].name}")
            _check_overwrite(self, task, ("forward",))
            _check_temporaries(task)
        for slot in self.slots:
            _require(bool(slot), None, "a slot has no way")
            reads = {v for v in slot[0].reads if self.values[v].kind == "backward"}
            for way in slot:
                _require(way.writes == slot[0].writes, way, "writes other values than its slot's first way")
                mine = {v for v in way.reads if self.values[v].kind == "backward"}
                _require(mine == reads, way, "reads other gradients than its slot's first way")
                for value in way.writes:
                    _require(self.values[value].kind == "backward", way, "is a slot's way and writes a forward value")
                for value in self.forward_reads(way):
                    _require(bool(self.producers[value]), way, f"reads {self.values[value].name}, which no task writes")
                _check_overwrite(self, way, ("forward", "backward"))
                _check_temporaries(way)
        read = {value for slot in self.slots for value in slot[0].reads}
        for value in self.tangents:
            _require(value in read, None, f"tangent {self.values[value].name} is read by no slot")
        for value in self.outputs:
            _require(bool(self.producers[value]), None, f"output {self.values[value].name} has no producer")


#: Positions of arguments whose numbers are of the model alone: strides, paddings, dilations, groups, sizes of windows.
_NUMBERS = {
    "aten.convolution.default": (3, 4, 5, 8),
    "aten.convolution_backward.default": (4, 5, 6, 9),
    "aten.max_pool2d_with_indices.default": (1, 2, 3, 4),
    "aten.max_pool2d_with_indices_backward.default": (2, 3, 4, 5),
}

#: Operators whose last argument is the name of the process group that they communicate in; "" in a plan made without
#: one.
_OF_A_GROUP = ("monet_like.sync_batch_norm_gather", "monet_like.sync_batch_norm_all_reduce")


def _described(task: Task) -> Iterator[str]:
    """The calls of a task for a fingerprint: temporaries by their order, no sizes, no devices, no process groups."""
    temporaries: dict[str, int] = {}

    def described(leaf: Any, numbers: bool) -> str:
        if isinstance(leaf, Ref):
            known = isinstance(leaf.name, int)
            return f"v{leaf.name}" if known else f"t{temporaries.setdefault(str(leaf.name), len(temporaries))}"
        if isinstance(leaf, tuple | list):
            return f"[{' '.join(filter(None, (described(part, numbers) for part in leaf)))}]"
        if leaf is None or isinstance(leaf, bool):
            return str(leaf)
        if isinstance(leaf, int | float | complex):
            return str(leaf) if numbers else ""
        text = str(leaf)
        is_device = text.startswith(("cpu", "cuda"))  # there are several alike
        return text if not is_device and (isinstance(leaf, str) or text.startswith("torch.")) else ""

    for call in task.calls:
        alike = _NUMBERS.get(call.op, ())
        known = call.args[:-1] if call.op.startswith(_OF_A_GROUP) else call.args
        args = [described(leaf, place in alike) for place, leaf in enumerate(known)]
        kwargs = [f"{name}={described(leaf, False)}" for name, leaf in call.kwargs]
        outs = [described(out, False) for out in call.outs]
        yield f"{call.op}({' '.join((*args, *kwargs))})->{' '.join(outs)}{call.unpack:d}"


def may_meet(one: Task, other: Task) -> bool:
    """Whether two forward tasks may run in the same stage."""
    return {one.runs, other.runs} != {"first", "again"}


def _check_overwrite(program: Program, task: Task, kinds: tuple[str, ...]) -> None:
    if task.overwrites is None:
        return
    _require(task.overwrites in task.reads, task, "overwrites a value that it does not read")
    _require(program.values[task.overwrites].kind in kinds, task, "overwrites a value that is not its own to overwrite")
    _require(task.overwrites not in (*program.outputs, *program.gradients), task, "overwrites an output")


def _check_temporaries(task: Task) -> None:
    made: set[int | str] = set()
    for call in task.calls:
        for ref in refs(call):
            _require(not isinstance(ref.name, str) or ref.name in made, task, f"uses {ref.name} before it makes it")
        made.update(out.name for out in call.outs if out is not None)


def _require(condition: bool, task: Task | None, rule: str) -> None:
    if not condition:
        raise MonetError(f"malformed program: {'task ' + task.name + ' ' if task else ''}{rule}")
