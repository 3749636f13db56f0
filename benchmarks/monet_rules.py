"""MONeT's cost tables as programs, and an independent reading of MONeT's rules to judge plans by.

The tables are the plain JSON files of the P100 benchmark (one per model; schema and rules in the README beside
them). `read_table` gives a `Program` and its costs; `monet_stages` says a schedule in MONeT's terms (stages, runs,
keep sets); `judge` replays that by MONeT's rules, on the JSON alone: it shares no code with the planner.

What MONeT's rules count and `monet_like.ir.simulate` does not: in every run, the inputs of the task and all tensors
that the full forward still reads after it are counted, whether or not they exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monet_like.ir.program import Cost, Program, Runs, Task, Value
from monet_like.ir.schedule import Schedule

Run = tuple[int, int]


@dataclass(frozen=True)
class Table:
    """One model of the benchmark.

    Attributes:
        data: the JSON file.
        program, costs: the same as a program.
        runs: for every forward task of the program, the table's tasks and alternatives that it stands for.
        ways: the same for every way of every slot.
    """

    data: dict[str, Any]
    program: Program
    costs: dict[str, Cost]
    runs: tuple[tuple[Run, ...], ...]
    ways: tuple[tuple[Run, ...], ...]


def read_table(path: Path) -> Table:
    """Read one model's JSON file."""
    return _Reader(json.loads(path.read_text())).table()


class _Reader:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.bytes = {tensor["id"]: int(tensor["bytes"]) for tensor in data["tensors"]}
        self.values: list[Value] = []
        self.index: dict[str, int] = {}
        self.tasks: list[Task] = []
        self.runs: list[tuple[Run, ...]] = []
        self.costs: dict[str, Cost] = {}
        self.outputs: list[int] = []

    def table(self) -> Table:
        fixed = self.data["fixed"]
        self._value("resident", fixed["initial_bytes"], "input")
        extras = {task["parent"]: task for task in self.data["forward"] if task.get("optional")}
        read = {name for task in self.data["forward"] if not task.get("optional") for name in task["inputs"]}
        for task in self.data["forward"]:
            self._value(task["outputs"][0], self.bytes[task["outputs"][0]], "forward")
        for task in self.data["forward"]:
            if not task.get("optional"):
                # The rules run the whole forward; here only what an output needs is run.
                must = [] if task["outputs"][0] in read else [self._value(f"{task['id']} ran", 0, "forward")]
                self.outputs += must
                self._forward(task, extras.get(task["id"]), must)
        slots, ways, gradients, tangent = self._backward()
        program = Program(
            tuple(self.values), tuple(self.tasks), tuple(slots), tuple(self.outputs), (tangent,), tuple(gradients)
        )
        program.check()
        return Table(self.data, program, self.costs, tuple(self.runs), tuple(ways))

    def _value(self, name: str, size: int, kind: Any) -> int:
        self.index[name] = len(self.values)
        self.values.append(Value(name, int(size), kind))
        return self.index[name]

    def _forward(self, task: dict[str, Any], extra: dict[str, Any] | None, must: list[int]) -> None:
        """All alternatives of one task, each also with the mask that may be packed while it runs."""
        for number, alternative in enumerate(task["alternatives"]):
            chosen = [(int(task["id"][1:]), number)]
            self._add(task, [(task, alternative)], chosen, must)
            if extra is not None:
                kind = "inplace" if alternative["name"] == "inplace" else "default"
                for other, packing in enumerate(extra["alternatives"]):
                    if packing["name"] == kind:
                        both = [*chosen, (int(extra["id"][1:]), other)]
                        self._add(task, [(task, alternative), (extra, packing)], both, must)

    def _add(self, task: dict[str, Any], parts: list[Any], runs: list[Run], must: list[int]) -> None:
        first = self._price(parts, "ms", "workspace_bytes")
        again = self._price(parts, "recompute_ms", "recompute_workspace_bytes")
        reads = tuple(self.index[name] for name in task["inputs"])
        writes = tuple(self.index[part["outputs"][0]] for part, _ in parts)
        taken = parts[0][1]["inplace_of"]
        name = "+".join(f"{part['id']}:{alternative['name']}" for part, alternative in parts)

        def put(suffix: str, when: Runs, cost: Cost, results: tuple[int, ...]) -> None:
            self.costs[name + suffix] = cost
            overwrites = None if taken is None else self.index[taken]
            self.tasks.append(Task(name + suffix, reads, results, cost=name + suffix, overwrites=overwrites, runs=when))
            self.runs.append(tuple(runs))

        if first == again and not must:
            put("", "both", first, writes)
        else:
            put(" first", "first", first, (*writes, *must))
            put(" again", "again", again, writes)

    def _price(self, parts: list[Any], seconds: str, workspace: str) -> Cost:
        """One cost for a task and its packing: seconds add, and of their two rows of memory the higher one counts.

        While the mask is packed, the task's own input is counted only if it is kept; a plan that keeps it would not
        pack the mask as well.
        """
        (task, chosen), *packing = parts
        saved = 0 if chosen["inplace_of"] is None else self.bytes[chosen["inplace_of"]]
        rows = [chosen.get(workspace, chosen["workspace_bytes"])]
        for part, alternative in packing:
            rows[0] -= self.bytes[part["outputs"][0]]
            inputs = sum(self.bytes[name] for name in task["inputs"])
            rows.append(alternative.get(workspace, alternative["workspace_bytes"]) - inputs)
        milliseconds = sum(alternative[seconds] for _, alternative in parts)
        return Cost(milliseconds / 1000, max(rows) + saved)

    def _backward(self) -> tuple[list[tuple[Task, ...]], list[tuple[Run, ...]], list[int], int]:
        data = self.data
        loss = data["backward"][0]["grad_inputs"][0]
        tangent = self._value(f"gradient of {loss}", self.bytes[loss], "backward")
        for task in data["backward"]:
            for name in task["grad_outputs"]:
                self._value(name, self.bytes[name], "backward")
        slots: list[tuple[Task, ...]] = []
        ways: list[tuple[Run, ...]] = []
        gradients: list[int] = []
        for task in data["backward"]:
            size = sum(part[1] for part in task["param_grads"])
            mine = [self._value(f"{task['id']} gradients", size, "backward")] if size else []
            gradients += mine
            grads = tuple(tangent if name == loss else self.index[name] for name in task["grad_inputs"])
            writes = (*(self.index[name] for name in task["grad_outputs"]), *mine)
            slot = []
            for number, alternative in enumerate(task["alternatives"]):
                key = f"{task['id']}:{number}"
                self.costs[key] = Cost(alternative["ms"] / 1000, alternative["workspace_bytes"])
                reads = tuple(dict.fromkeys([*grads, *(self.index[name] for name in alternative["needs"])]))
                slot.append(Task(key, reads, writes, cost=key))
            slots.append(tuple(slot))
            ways.append(tuple((int(task["id"][1:]), number) for number in range(len(slot))))
        return slots, ways, gradients, tangent


@dataclass(frozen=True)
class Stage:
    """What MONeT does in one stage: forward runs, the backward run (None in stage 0), what is held through it."""

    run: tuple[Run, ...]
    backward: Run | None
    keep: frozenset[int]


def monet_stages(table: Table, schedule: Schedule) -> list[Stage]:
    """A schedule in MONeT's terms; ``keep`` holds what the backward task reads and the stage does not make, and what a
    later stage reads before it is made anew."""
    program = table.program

    def number(values: Iterable[int]) -> frozenset[int]:
        return frozenset(int(program.values[v].name[1:]) for v in values if program.values[v].bytes)

    stages: list[Stage] = []
    wanted: set[int] = set()
    for slot in reversed(range(len(schedule.again))):
        way = program.slots[slot][schedule.ways[slot]]
        made = {v for p in schedule.again[slot] for v in program.tasks[p].writes}
        keep = number(wanted | (set(program.forward_reads(way)) - made))
        runs = tuple(run for p in schedule.again[slot] for run in table.runs[p])
        stages.append(Stage(runs, table.ways[slot][schedule.ways[slot]], keep))
        wanted |= set(program.forward_reads(way))
        for p in reversed(schedule.again[slot]):
            wanted -= set(program.tasks[p].writes)
            wanted |= set(program.forward_reads(program.tasks[p]))
    stages.append(Stage(tuple(run for p in schedule.forward for run in table.runs[p]), None, number(wanted)))
    return stages[::-1]


def published_stages(schedule: list[dict[str, Any]]) -> list[Stage]:
    """The same for a schedule of the data files."""
    stages: list[Stage] = []
    keep: set[int] = set()
    for stage in schedule:
        keep = (keep | set(stage["keep_add"])) - set(stage["keep_drop"])
        backward = None if stage["bwd"] is None else (stage["bwd"][0], stage["bwd"][1])
        stages.append(Stage(tuple((j, a) for j, a in stage["run"]), backward, frozenset(keep)))
    return stages


@dataclass(frozen=True)
class Verdict:
    """What MONeT's rules say.

    Attributes:
        ms: of the whole step.
        peak_bytes: the largest row of memory.
        violation: the first rule that is broken; "" if none is.
        rows: of every forward task that is run in a later stage, by its number, its largest row.
    """

    ms: float
    peak_bytes: int
    violation: str = ""
    rows: Mapping[int, int] = field(default_factory=dict)


def judge(data: Mapping[str, Any], stages: list[Stage]) -> Verdict:
    """Replay stages by the rules beside the data: legality, time, and all rows of memory."""
    size = {tensor["id"]: int(tensor["bytes"]) for tensor in data["tensors"]}
    forward, backward = data["forward"], data["backward"]
    count = len(forward)
    place = {task["outputs"][0]: j for j, task in enumerate(forward)}
    out = [size[task["outputs"][0]] for task in forward]
    last_reader = [-1] * count
    for j, task in enumerate(forward):
        for name in task["inputs"]:
            last_reader[place[name]] = max(last_reader[place[name]], j)
    static = [
        {place[name] for name in task["inputs"]} | {i for i in range(j) if last_reader[i] > j}
        for j, task in enumerate(forward)
    ]
    if len(stages) != len(backward) + 1:
        return Verdict(0.0, 0, f"{len(stages)} stages")
    fixed = int(data["fixed"]["initial_bytes"])
    readers: dict[str, int] = {name: t for t, task in enumerate(backward, 1) for name in task["grad_inputs"]}
    born = {name: t for t, task in enumerate(backward, 1) for name in task["grad_outputs"]}
    born.setdefault(backward[0]["grad_inputs"][0], 0)
    cents, peak, kept = 0, 0, frozenset[int]()
    rows: dict[int, int] = {}
    for t, stage in enumerate(stages):
        task = backward[t - 1] if t else None
        grads = sum(size[name] for name, start in born.items() if t and start < t <= readers.get(name, 0))
        base = fixed + grads
        needs: set[int] = set()
        chosen = None
        if task is not None:
            assert stage.backward is not None
            if stage.backward[0] != count + t - 1:
                return Verdict(0.0, 0, f"stage {t} runs backward task {stage.backward[0]}")
            chosen = task["alternatives"][stage.backward[1]]
            needs = {place[name] for name in chosen["needs"]}
        waiting = needs - stage.keep
        made: set[int] = set()
        dead: set[int] = set()
        done = [j for j, _ in stage.run]
        if sorted(set(done)) != done:
            return Verdict(0.0, 0, f"stage {t} runs out of order")
        if t == 0 and any(not task.get("optional") and j not in done for j, task in enumerate(forward)):
            return Verdict(0.0, 0, "stage 0 leaves out a task")
        alternative_of = dict(stage.run)
        for j in range(count):
            held = sum(out[i] for i in waiting if i < j)
            after = sum(out[i] for i in stage.keep if i < j)
            before = sum(out[i] for i in kept if i >= j)
            peak = max(peak, base + before + after + held)
            if j not in alternative_of:
                continue
            alternative = forward[j]["alternatives"][alternative_of[j]]
            for name in forward[j]["inputs"]:
                i = place[name]
                if (i not in made and i not in kept) or (i in dead and not forward[j].get("optional")):
                    return Verdict(0.0, 0, f"stage {t}: f{j} needs a{i}")
            if forward[j].get("optional"):
                parent = int(forward[j]["parent"][1:])
                if parent not in alternative_of:
                    return Verdict(0.0, 0, f"stage {t}: f{j} runs without f{parent}")
                in_place = forward[parent]["alternatives"][alternative_of[parent]]["inplace_of"] is not None
                if in_place != (alternative["inplace_of"] is not None) and len(forward[j]["alternatives"]) > 1:
                    return Verdict(0.0, 0, f"stage {t}: f{j} is not in place as f{parent} is")
            workspace = alternative["workspace_bytes"]
            if t:
                workspace = alternative.get("recompute_workspace_bytes", workspace)
            row = base + workspace + out[j] + sum(out[i] for i in static[j]) + held
            row += sum(out[i] for i in kept if i > j)
            row += sum(out[i] for i in stage.keep if i < j and i not in static[j])
            peak = max(peak, row)
            if t:
                rows[j] = max(rows.get(j, 0), row)
            cents += round(100 * alternative["recompute_ms" if t else "ms"])
            made.add(j)
            if alternative["inplace_of"] is not None and not forward[j].get("optional"):
                dead.add(place[alternative["inplace_of"]])
        if not stage.keep <= (kept | made) - dead:
            return Verdict(
                0.0, 0, f"stage {t} keeps what it does not have: {sorted(stage.keep - ((kept | made) - dead))}"
            )
        if task is not None and chosen is not None:
            if not needs <= ((kept | made) - dead) & (stage.keep | made):
                return Verdict(0.0, 0, f"stage {t}: the backward task lacks {sorted(needs - ((kept | made) - dead))}")
            fixed += sum(part[1] for part in task["param_grads"])
            row = fixed + grads + sum(size[name] for name in task["grad_outputs"]) + chosen["workspace_bytes"]
            row += sum(out[i] for i in needs | stage.keep)
            peak = max(peak, row)
            cents += round(100 * chosen["ms"])
        kept = stage.keep
    return Verdict(cents / 100, peak, rows=rows)
