"""Charts of a report as Vega-Lite specifications, which Vega draws in a page and vl-convert in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ir.units import GIB, KIB, MIB
from .figures import KINDS, Course, Run, groups
from .live import Live

Spec = dict[str, Any]

PLAIN, OURS = "plain PyTorch", "this schedule"
#: A strategy's (peak bytes, seconds) at several budgets.
Fronts = Mapping[str, Sequence[tuple[int, float]]]

#: Of the kinds of memory, by their keys in `KINDS`.
COLOURS: Mapping[str, str] = {
    "parameters": "#8c939c",
    "optimizer": "#c3c8ce",
    "cublas": "#dfe3e8",
    "inputs": "#b9a36b",
    "gradients": "#5f9e8f",
    "kept": "#4c78a8",
    "passing": "#a9cbe6",
    "recomputed": "#f58518",
    "backward": "#b7d59a",
    "workspace": "#b279a2",
}
_BUDGET = "#d6404b"
_WIDTH = 900
_MOST_BARS = 44


def unit_of(count: float) -> tuple[str, int]:
    """The unit (name and bytes) in which to show amounts up to ``count`` bytes."""
    return next(((name, size) for name, size in (("GB", GIB), ("MB", MIB)) if count >= size), ("KB", KIB))


def _time_unit(seconds: float) -> tuple[str, float]:
    return next(((name, size) for name, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))


def _short(number: float) -> float:
    return float(f"{number:.5g}")


def _spec(content: Spec) -> Spec:
    schema = "https://vega.github.io/schema/vega-lite/v6.json"
    return {"$schema": schema, "config": {"view": {"stroke": None}}, **content}


def _colours(kinds: Sequence[str]) -> Spec:
    names = [KINDS[kind] for kind in kinds]
    return {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": names, "range": [COLOURS[kind] for kind in kinds]},
        "legend": {"title": None, "orient": "top", "columns": 5, "symbolType": "square", "labelLimit": 300},
    }


def _present(courses: Sequence[Course]) -> list[str]:
    places = [any(run.bytes[place] for course in courses for run in course.runs) for place in range(len(KINDS))]
    return [kind for kind, there in zip(KINDS, places, strict=True) if there]


def _memory_rows(plain: Course, ours: Course, kinds: Sequence[str], tick: float, size: float) -> list[dict[str, Any]]:
    """A row for every run of both steps, with times in units of ``tick`` seconds and memory in units of
    ``size`` bytes.
    """
    rows: list[dict[str, Any]] = []
    for name, course in ((PLAIN, plain), (OURS, ours)):
        for run in course.runs:
            row: dict[str, Any] = {"step": name, "task": _label(run), "layer": run.layer}
            row |= {"x": _short(run.begins / tick), "end": _short((run.begins + run.seconds) / tick)}
            row["all"] = _short(run.total_bytes / size)
            row |= {_key(k): _short(n / size) for k, n in zip(KINDS, run.bytes, strict=True) if k in kinds}
            rows.append(row)
        rows.append({**rows[-1], "x": rows[-1]["end"]})  # the last run has a width too
    for number, row in enumerate(rows):
        row["n"] = number
    return rows


def _budget_line(budget: float) -> tuple[Spec, Spec]:
    """A dashed line at the budget, and the word above it."""
    line = {
        "data": {"values": [{"budget": _short(budget)}]},
        "mark": {"type": "rule", "color": _BUDGET, "strokeDash": [5, 3], "strokeWidth": 1.5},
        "encoding": {"y": {"field": "budget", "type": "quantitative"}},
    }
    word = {
        "data": {"values": [{"budget": _short(budget), "word": "budget"}]},
        "mark": {"type": "text", "color": _BUDGET, "align": "right", "baseline": "bottom", "dy": -3, "x": _WIDTH - 4},
        "encoding": {"y": {"field": "budget", "type": "quantitative"}, "text": {"field": "word"}},
    }
    return line, word


def memory_chart(plain: Course, ours: Course, budget_bytes: int) -> Spec:
    """Memory over the step, stacked by kind, of both steps on the same axes; and the budget."""
    top = max(plain.peak.total_bytes, ours.peak.total_bytes, budget_bytes)
    unit, size = unit_of(top)
    clock, tick = _time_unit(max(plain.seconds, ours.seconds))
    kinds = _present((plain, ours))
    longest = max(plain.seconds, ours.seconds) / tick
    rows = _memory_rows(plain, ours, kinds, tick, size)
    x = {
        "field": "x",
        "type": "quantitative",
        "title": f"time within the step, {clock}",
        "scale": {"domain": [0, _short(longest)], "nice": False},
    }
    y = {
        "type": "quantitative",
        "title": f"memory, {unit}",
        "scale": {"domain": [0, _short(1.04 * top / size)], "nice": False},
    }
    area = {
        "transform": [
            {"fold": [_key(k) for k in kinds], "as": ["key", "amount"]},
            {"calculate": f"{ {_key(k): KINDS[k] for k in kinds} }[datum.key]", "as": "kind"},
            {"calculate": f"indexof({[_key(k) for k in kinds]}, datum.key)", "as": "place"},
            # Of every row by itself: runs that take no time share their x.
            {"stack": "amount", "groupby": ["n"], "sort": [{"field": "place"}], "as": ["low", "high"]},
        ],
        "mark": {"type": "area", "interpolate": "step-after", "line": False},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": _colours(kinds)},
    }
    tips = [{"field": "task"}, {"field": "layer"}, {"field": "all", "title": f"memory, {unit}", "format": ".4~g"}]
    tips += [{"field": _key(k), "title": KINDS[k], "format": ".3~g"} for k in kinds]
    return _spec(
        {
            "data": {"values": rows},
            "facet": {
                "row": {"field": "step", "type": "nominal", "sort": [PLAIN, OURS], "title": None,
                        "header": {"labelOrient": "top", "labelAnchor": "start", "labelFontWeight": "bold"}}
            },
            "spec": {"width": _WIDTH, "height": 220, "layer": [area, *_budget_line(budget_bytes / size), _pointed(x,
            tips)]},
        }
    )  # fmt: skip


def _pointed(x: Spec, tips: Sequence[Spec]) -> Spec:
    """A band over each run, shown under the pointer, with a tooltip that names the run."""
    return {
        "params": [{"name": "at", "select": {"type": "point", "on": "pointerover", "clear": "pointerout"}}],
        "mark": {"type": "rect", "color": "#555"},
        "encoding": {
            "x": x,
            "x2": {"field": "end"},
            "opacity": {"condition": {"param": "at", "empty": False, "value": 0.35}, "value": 0},
            "tooltip": tips,
        },
    }


def _key(kind: str) -> str:
    """A short name for a field of hundreds of rows."""
    return f"k{list(KINDS).index(kind)}"


def _label(run: Run) -> str:
    return f"{run.task} (again)" if run.again else run.task


def layers_chart(plain: Course, ours: Course) -> Spec:
    """Memory at each step's peak by layer and kind."""
    unit, size = unit_of(max(plain.peak.total_bytes, ours.peak.total_bytes) / 4)
    rows, order = [], _grouped(plain, ours)
    for name, course in ((PLAIN, plain), (OURS, ours)):
        summed: dict[str, list[int]] = {}
        for layer, counts in course.at_peak.items():
            into = summed.setdefault(order[layer], [0] * len(KINDS))
            into[:] = [a + b for a, b in zip(into, counts, strict=True)]
        for layer, counts_ in summed.items():
            for place, (kind, count) in enumerate(zip(KINDS, counts_, strict=True)):
                if count:
                    row = {"step": name, "layer": layer, "kind": KINDS[kind], "place": place}
                    rows.append({**row, "amount": _short(count / size)})
    kinds = [kind for kind, name in KINDS.items() if any(row["kind"] == name for row in rows)]
    return _spec(
        {
            "data": {"values": rows},
            "mark": {"type": "bar"},
            "width": (_WIDTH - 160) // 2,
            "height": {"step": 17},
            "encoding": {
                "column": {"field": "step", "type": "nominal", "sort": [PLAIN, OURS], "title": None,
                           "header": {"labelFontWeight": "bold", "labelAnchor": "start"}},
                "y": _layer_axis(rows, order),
                "x": {"field": "amount", "type": "quantitative", "title": f"memory at the peak, {unit}",
                "stack": "zero"},
                "color": _colours(kinds),
                "order": {"field": "place", "type": "quantitative"},
                "tooltip": [{"field": "layer"}, {"field": "kind"}, {"field": "amount", "title": f"memory, {unit}",
                "format": ".3~g"}],
            },
        }
    )  # fmt: skip


def _grouped(plain: Course, ours: Course) -> dict[str, str]:
    """Layers grouped for display, in the order of the model."""
    names = dict.fromkeys([run.layer for run in plain.runs] + [run.layer for run in ours.runs])
    return groups(list(dict.fromkeys([*names, *plain.at_peak, *ours.at_peak])), _MOST_BARS)


def _layer_axis(rows: Sequence[Mapping[str, Any]], order: Mapping[str, str]) -> Spec:
    """The layers of the rows, in the order of the model."""
    there = {row["layer"] for row in rows}
    layers = [layer for layer in dict.fromkeys(order.values()) if layer in there]
    return {"field": "layer", "type": "nominal", "title": None, "axis": {"labelLimit": 200}, "sort": layers}


def recomputed_chart(plain: Course, ours: Course) -> Spec:
    """Seconds of recomputation by layer and operator."""
    order = _grouped(plain, ours)
    again = [run for run in ours.runs if run.again]
    clock, tick = _time_unit(sum(run.seconds for run in again))
    found: dict[tuple[str, str], list[float]] = {}
    for run in again:
        entry = found.setdefault((order[run.layer], run.operator or run.task), [0.0, 0])
        entry[0] += run.seconds
        entry[1] += 1
    rows = [
        {"layer": layer, "operator": operator, "seconds": _short(seconds / tick), "runs": runs}
        for (layer, operator), (seconds, runs) in found.items()
    ]
    return _spec(
        {
            "data": {"values": rows},
            "mark": "bar",
            "width": _WIDTH - 220,
            "height": {"step": 17},
            "encoding": {
                "y": _layer_axis(rows, order),
                "x": {"field": "seconds", "type": "quantitative", "title": f"time of what runs again, {clock}"},
                "color": {"field": "operator", "type": "nominal", "scale": {"scheme": "tableau10"},
                          "legend": {"title": None, "orient": "top", "columns": 4, "symbolType": "square",
                          "labelLimit": 300}},
                "tooltip": [{"field": "layer"}, {"field": "operator"}, {"field": "runs"},
                            {"field": "seconds", "title": f"time, {clock}"}],
            },
        }
    )  # fmt: skip


def front_chart(fronts: Fronts, plain: Course, ours: Course, budget_bytes: int) -> Spec:
    """Step time over peak memory: a line for each strategy, and points for plain PyTorch and this schedule."""
    ends = [(plain.peak.total_bytes, plain.seconds), (ours.peak.total_bytes, ours.seconds)]
    points = [*ends, *(point for line in fronts.values() for point in line)]
    unit, size = unit_of(max(peak for peak, _ in points))
    clock, tick = _time_unit(max(seconds for _, seconds in points))
    rows = [
        {"strategy": name, "x": _short(peak / size), "y": _short(seconds / tick)}
        for name, line in fronts.items()
        for peak, seconds in sorted(line)
    ]
    stars = [
        {"what": name, "x": _short(peak / size), "y": _short(seconds / tick)}
        for name, (peak, seconds) in zip((PLAIN, OURS), ends, strict=True)
    ]
    x = {"field": "x", "type": "quantitative", "title": f"peak memory, {unit}", "scale": {"zero": False}}
    y = {"field": "y", "type": "quantitative", "title": f"step, predicted, {clock}", "scale": {"zero": False}}
    tips = [{"field": "x", "title": f"peak, {unit}"}, {"field": "y", "title": f"step, {clock}"}]
    named = {"x": x, "y": y, "text": {"field": "what"}}
    lines = {
        "data": {"values": rows},
        "mark": {"type": "line", "point": {"size": 36}, "strokeWidth": 1.6},
        "encoding": {
            "x": x, "y": y,
            "color": {"field": "strategy", "type": "nominal", "sort": list(fronts),
                      "legend": {"title": None, "orient": "right", "labelLimit": 200}},
            "tooltip": [{"field": "strategy"}, *tips],
        },
    }  # fmt: skip
    marks = {
        "data": {"values": stars},
        "mark": {"type": "point", "shape": "diamond", "filled": True, "size": 130, "color": "#777"},
        "encoding": {"x": x, "y": y, "tooltip": [{"field": "what"}, *tips]},
    }
    words = {
        "data": {"values": stars},
        "mark": {"type": "text", "align": "left", "dx": 9, "dy": -7, "fontWeight": "bold", "color": "#777"},
        "encoding": named,
    }
    limit = {
        "data": {"values": [{"x": _short(budget_bytes / size)}]},
        "mark": {"type": "rule", "color": _BUDGET, "strokeDash": [5, 3]},
        "encoding": {"x": x},
    }
    return _spec({"width": _WIDTH - 200, "height": 320, "layer": [limit, lines, marks, words]})


def live_chart(ours: Course, live: Live, budget_bytes: int) -> Spec:
    """Memory at every run of the schedule: predicted as an area, measured as a line."""
    unit, size = unit_of(max(*live.bytes, ours.peak.total_bytes))
    rows = [
        {
            "x": place, "end": place + 1, "task": _label(run), "layer": run.layer,
            "predicted": _short(run.total_bytes / size), "measured": _short(count / size),
            "difference": _short((count - run.total_bytes) / size),
        }
        for place, (run, count) in enumerate(zip(ours.runs, live.bytes, strict=True))
    ]  # fmt: skip
    x = {"field": "x", "type": "quantitative", "title": "run", "scale": {"nice": False}}
    y = {"type": "quantitative", "title": f"memory, {unit}"}
    legend = {"type": "nominal", "scale": {"domain": ["predicted", "measured"], "range": ["#a9cbe6", "#c2410c"]},
              "legend": {"title": None, "orient": "top"}}  # fmt: skip
    tips = [{"field": name} for name in ("task", "layer")]
    tips += [
        {"field": name, "title": f"{name}, {unit}", "format": ".4~g"}
        for name in ("predicted", "measured", "difference")
    ]
    return _spec(
        {
            "data": {"values": rows},
            "width": _WIDTH,
            "height": 260,
            "layer": [
                {
                    "mark": {"type": "area", "interpolate": "step-after"},
                    "encoding": {"x": x, "y": {**y, "field": "predicted"}, "color": {"datum": "predicted", **legend}},
                },
                {
                    "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.2},
                    "encoding": {"x": x, "y": {**y, "field": "measured"}, "color": {"datum": "measured", **legend}},
                },
                _budget_line(budget_bytes / size)[0],
                _pointed(x, tips),
            ],
        }
    )
