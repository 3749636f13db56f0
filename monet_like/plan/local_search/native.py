"""The compiled local search: csrc/plan/local_search.cpp through ctypes.

Without it, uncompiled.py evaluates policies, slower.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from ...build import library_path
from ...ir.schedule import Schedule
from ..instance import Instance
from .policy import Judgement, Policy, Settings, Tables
from .uncompiled import Uncompiled

_TYPES: dict[str, Any] = {"i": ctypes.c_int32, "q": ctypes.c_int64, "d": ctypes.c_double, "B": ctypes.c_uint8}


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """A ctypes structure from ``name:type`` fields: a letter is a number of that type, a letter and * a pointer to
    some.
    """
    made = []
    for field in fields.split():
        field_name, kind = field.split(":")
        base = _TYPES.get(kind[0], ctypes.c_uint64)
        made.append((field_name, ctypes.POINTER(base) if kind.endswith("*") else base))
    return type(name, (ctypes.Structure,), {"_fields_": made})


# In the order of the C++ structures; the library tells their sizes.
_Tables = _structure(
    "_Tables",
    "values:q classes:q slots:q resident:q output_bytes:q bytes:q* output:B* read_start:i* reads:i* write_start:i* "
    "writes:i* written:q* shared:B* once:B* first_seconds:d* again_seconds:d* member_start:i* member_seconds:d* "
    "member_extra:q* member_taken:i* member_runs:B* first_start:i* first:i* again_start:i* again:i* option_start:i* "
    "option_read_start:i* option_reads:i* way_start:i* way_seconds:d* way_extra:q* before:q* during:q* "
    "use_start:i* uses:i* stages:i* ends:i*",
)
_Policy = _structure("_Policy", "keep:B* hold:B* cut:i* early:i* option:i* prefer:i*")
_Judgement = _structure("_Judgement", "seconds:d peak:q excess:d steps:q")
_Runs = _structure("_Runs", "forward:i* again:i* again_start:i* way:i* forward_count:q again_count:q")
_Settings = _structure(
    "_Settings",
    "budget:q evaluations:q most_steps:q seed:Q first_weight:d last_weight:d first_temperature:d last_temperature:d "
    "candidate_count:q choice_count:q prefer_count:q candidates:i* choices:i* preferring:i*",
)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None if it was not built or is of another version."""
    try:
        loaded = ctypes.CDLL(str(library_path("search")))
        for function in (loaded.monet_like_sizes, loaded.monet_like_improve, loaded.monet_like_place):
            function.restype = ctypes.c_int64
        sizes = [loaded.monet_like_sizes(which) for which in range(4)]
    except (OSError, AttributeError):
        return None
    return loaded if sizes == [ctypes.sizeof(s) for s in (_Tables, _Policy, _Settings, _Runs)] else None


def engine(instance: Instance, tables: Tables) -> NativeEngine | Uncompiled:
    """The compiled engine; where the library is missing, one in Python, which improves nothing."""
    loaded = library()
    return Uncompiled(instance, tables) if loaded is None else NativeEngine(tables, loaded)


class NativeEngine:
    """Evaluates and anneals policies of one program. Calls release the interpreter's lock: several may run at once."""

    def __init__(self, tables: Tables, loaded: ctypes.CDLL) -> None:
        self.t, self.library = tables, loaded
        self.held: list[Any] = []  # arrays that the structure points to
        members = [m for ms in tables.members for m in ms]
        ways = [w for ws in tables.ways for w in ws]
        self.tasks = [m.task for m in members]
        self.way_numbers = [w.way for w in ways]
        self.tables = _Tables(
            values=len(tables.bytes),
            classes=len(tables.writes),
            slots=len(tables.options),
            resident=tables.resident_bytes,
            output_bytes=tables.output_bytes,
            bytes=self._point("q", tables.bytes),
            output=self._point("B", tables.output),
            written=self._point("q", tables.written_bytes),
            shared=self._point("B", tables.shared),
            once=self._point("B", tables.once),
            first_seconds=self._point("d", tables.first_seconds),
            again_seconds=self._point("d", tables.again_seconds),
            member_start=self._starts(tables.members),
            member_seconds=self._point("d", (m.seconds for m in members)),
            member_extra=self._point("q", (m.extra for m in members)),
            member_taken=self._point("i", (m.taken for m in members)),
            member_runs=self._point("B", (m.runs for m in members)),
            option_start=self._starts(tables.options),
            way_start=self._starts(tables.ways),
            way_seconds=self._point("d", (w.seconds for w in ways)),
            way_extra=self._point("q", (w.extra for w in ways)),
            before=self._point("q", tables.before),
            during=self._point("q", tables.during),
            **self._lists("read_start", "reads", tables.reads),
            **self._lists("write_start", "writes", tables.writes),
            **self._lists("first_start", "first", tables.first),
            **self._lists("again_start", "again", tables.again),
            **self._lists("option_read_start", "option_reads", tables.option_reads),
            **self._lists("use_start", "uses", tables.uses),
            stages=self._point("i", tables.stages),
            ends=self._point("i", tables.ends),
        )

    def _point(self, kind: str, numbers: Iterable[Any]) -> Any:
        """A pointer to a copy of the numbers that lives as long as this object."""
        made = (_TYPES[kind] * len(held))(*held) if (held := list(numbers)) else (_TYPES[kind] * 1)()
        self.held.append(made)
        return ctypes.cast(made, ctypes.POINTER(_TYPES[kind]))

    def _starts(self, lists: Sequence[Sequence[Any]]) -> Any:
        starts = [0]
        for entries in lists:
            starts.append(starts[-1] + len(entries))
        return self._point("i", starts)

    def _lists(self, start: str, entries: str, lists: Sequence[Sequence[int]]) -> dict[str, Any]:
        return {start: self._starts(lists), entries: self._point("i", (v for one in lists for v in one))}

    def judge(self, policy: Policy, budget_bytes: int) -> tuple[Judgement, Schedule] | None:
        """The cost of a policy, and its schedule before `prune`; None if it cannot be carried out."""
        slots = len(self.t.options)
        # A class runs at most once per stage.
        room = max(1, len(self.t.writes))
        forward, starts, ways = array("i", [0]) * room, array("i", [0]) * (slots + 1), array("i", [0]) * (slots + 1)
        again = array("i", [0]) * (room * max(1, slots))
        runs = _Runs(storage_of(forward), storage_of(again), storage_of(starts), storage_of(ways), 0, 0)
        found = _Judgement()
        legal = self.library.monet_like_judge(
            ctypes.byref(self.tables),
            ctypes.byref(_policy(policy)),
            ctypes.c_int64(budget_bytes),
            ctypes.byref(found),
            ctypes.byref(runs),
        )
        if not legal:
            return None
        # Slots are settled from the last to the first: a slot's runs begin where those of the slot after it end.
        ends = [*starts[:slots], 0]
        schedule = Schedule(
            tuple([self.tasks[m] for m in forward[: runs.forward_count]]),
            tuple([tuple([self.tasks[m] for m in again[ends[slot + 1] : ends[slot]]]) for slot in range(slots)]),
            tuple([self.way_numbers[k] for k in ways[:slots]]),
        )
        return Judgement(found.seconds, found.peak, found.excess, found.steps), schedule

    def improve(self, policy: Policy, settings: Settings) -> Policy:
        """Simulated annealing: the fastest policy seen that fits, or the one nearest to fitting."""
        current, best = policy.copy(), policy.copy()
        changeable = (self.t.changeable, self.t.choices, self.t.preferring)
        lists = [array("i", some) or array("i", [0]) for some in changeable]
        passed = _Settings(
            settings.budget_bytes,
            settings.evaluations,
            settings.most_steps,
            settings.seed,
            settings.first_weight,
            settings.last_weight,
            settings.first_temperature,
            settings.last_temperature,
            *map(len, changeable),
            *map(storage_of, lists),
        )
        self.library.monet_like_improve(
            ctypes.byref(self.tables),
            ctypes.byref(_policy(current)),
            ctypes.byref(_policy(best)),
            ctypes.byref(passed),
        )
        return best


def storage_of(numbers: array[Any]) -> Any:
    """A pointer to an array's own storage, for a compiled function."""
    kind = _TYPES[numbers.typecode]
    return ctypes.cast((kind * len(numbers)).from_buffer(numbers), ctypes.POINTER(kind))


def _policy(policy: Policy) -> Any:
    return _Policy(*map(storage_of, (policy.keep, policy.hold, policy.cut, policy.early, policy.option, policy.prefer)))
