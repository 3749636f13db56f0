"""How a program, a profile, a schedule, a plan and a record are printed: one line each."""

from __future__ import annotations

import pytest

from monet_like.ir.profile_file import Profile
from monet_like.ir.program import REFUSED, Cost, Program, Task, Value
from monet_like.ir.schedule import Schedule
from monet_like.ir.schedule_file import InputSpec, ScheduleRecord
from monet_like.ir.simulate import simulate
from monet_like.ir.units import KIB, MIB
from monet_like.plan.result import Plan

PROGRAM = Program(
    values=(
        Value("weight", 4 * KIB, "parameter"), Value("<x>", MIB, "input"), Value("y", 2 * MIB, "forward"),
        Value("grad", 4 * KIB, "backward"),
    ),
    tasks=(Task("multiply", (0, 1), (2,), "mm"), Task("multiply.packed", (0, 1), (2,), "packed", "packed", "newnode")),
    slots=((Task("backward", (1, 2), (3,), "mm_back"),),),
    outputs=(),
    gradients=(3,),
)  # fmt: skip
COSTS = {"mm": Cost(1e-3, KIB), "packed": REFUSED, "mm_back": Cost(2e-3)}
PROFILE = Profile("cpu: EPYC", COSTS, "measured at batch 8")
SCHEDULE = Schedule((0,), ((0,),), (0,))
PLAN = Plan(SCHEDULE, simulate(PROGRAM, SCHEDULE, COSTS), "optimal", 0.004, "unrestricted", 0.0, found_by="CBC")
RECORD = ScheduleRecord(
    SCHEDULE, "net", (InputSpec((8, 3), "float32"),), "normal", 4 * MIB, "", "cpu: EPYC", {}, 3 * MIB, 0.004,
    6 * MIB, 0.003, "CBC", "optimal", gap=0.0,
)  # fmt: skip
LINES = {
    "program": (PROGRAM, "Program(4 values, 2 forward tasks, 1 backward slots, 1 parameters in 4.0 KB)"),
    "profile": (PROFILE, "Profile(3 operators on cpu: EPYC, measured at batch 8)"),
    "schedule": (SCHEDULE, "Schedule(1 forward tasks, 1 recomputed, 1 backward slots)"),
    "plan": (PLAN, "Plan(optimal: peak 3.0 MB, step 4.0 ms, gap 0.00 %, found by CBC)"),
    "record": (
        RECORD,
        "ScheduleRecord(net, float32[8, 3], normal: 3.0 MB of 4.0 MB, step 4.0 ms predicted for cpu: EPYC)",
    ),
}


@pytest.mark.parametrize("name", list(LINES))
def test_one_line(name: str) -> None:
    thing, line = LINES[name]
    assert repr(thing) == line
