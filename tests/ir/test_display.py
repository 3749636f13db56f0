"""How a program, a profile, a schedule, a plan and a record are printed: one line each, and a table in notebooks."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from monet_like.ir.display import MOST_ROWS, html_table
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
    "program": (PROGRAM, "Program(4 values, 2 forward tasks, 1 backward slots, 1 parameters in 4.0 KB)", 3),
    "profile": (PROFILE, "Profile(3 operators on cpu: EPYC, measured at batch 8)", 2),
    "schedule": (SCHEDULE, "Schedule(1 forward tasks, 1 recomputed, 1 backward slots)", 1),
    "plan": (PLAN, "Plan(optimal: peak 3.0 MB, step 4.0 ms, gap 0.00 %, found by CBC)", 7),
    "record": (
        RECORD,
        "ScheduleRecord(net, float32[8, 3], normal: 3.0 MB of 4.0 MB, step 4.0 ms predicted for cpu: EPYC)",
        10,
    ),
}


class Cells(HTMLParser):
    """The text of a table, by row; raises where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.caption, self._open = "", list[str]()
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] == "caption":
            self.caption += data
        else:
            self.rows[-1].append(data)


@pytest.mark.parametrize("name", list(LINES))
def test_one_line_and_one_table(name: str) -> None:
    thing, line, rows = LINES[name]
    assert repr(thing) == line
    table = Cells(thing._repr_html_())
    assert table.caption == line
    assert len([row for row in table.rows if row]) in (rows, rows + 1)  # a header, where the columns have names


def test_names_are_escaped_and_long_tables_end() -> None:
    assert "&lt;x&gt; (1.0 MB)" in PROGRAM._repr_html_()
    table = Cells(html_table("many", ("number",), ((k,) for k in range(100)), 100))
    assert table.rows[1:] == [[str(k)] for k in range(MOST_ROWS)] + [[f"{100 - MOST_ROWS} more"]]
