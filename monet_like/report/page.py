"""Writes the report: one HTML file with pictures, tables and scripts inside, which loads and sends nothing."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..ir.display import short_repr
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from .charts import OURS, PLAIN, Fronts, Spec, front_chart, layers_chart, live_chart, memory_chart, recomputed_chart
from .figures import KINDS, Course
from .live import Live

if TYPE_CHECKING:
    import pandas

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, repr=False)
class Figures:
    """All data of a report.

    Attributes:
        record: the schedule file.
        plain, ours: the two steps.
        device: whose costs these are.
        fronts: fronts of other strategies; empty if they were not asked for.
        live: a real step, if one was run.
    """

    __repr__ = short_repr

    record: ScheduleRecord
    plain: Course
    ours: Course
    device: str
    fronts: Fronts
    live: Live | None = None

    def to_frame(self) -> pandas.DataFrame:
        """The schedule's memory timeline, as `Course.to_frame`; after a real step with ``measured_bytes``."""
        found = self.ours.to_frame()
        if self.live is not None:
            found.insert(list(found.columns).index("bytes") + 1, "measured_bytes", self.live.bytes)
        return found


def charts(figures: Figures) -> dict[str, Spec]:
    """The pictures, by name."""
    plain, ours, budget = figures.plain, figures.ours, figures.record.budget_bytes
    found = {"memory": memory_chart(plain, ours, budget), "layers": layers_chart(plain, ours)}
    if any(run.again for run in ours.runs):
        found["recomputed"] = recomputed_chart(plain, ours)
    if figures.fronts:
        found["front"] = front_chart(figures.fronts, plain, ours, budget)
    if figures.live is not None:
        found["live"] = live_chart(ours, figures.live, budget)
    return found


def pictures(specs: Mapping[str, Spec]) -> dict[str, bytes]:
    """The pictures as PNG, by name.

    Raises:
        UsageError: vl-convert is not installed.
    """
    converter = vega()
    return {name: converter.vegalite_to_png(spec, scale=2) for name, spec in specs.items()}


def page(figures: Figures, specs: Mapping[str, Spec]) -> str:
    """The page as text.

    Raises:
        UsageError: vl-convert is not installed.
    """
    import jinja2
    import markupsafe  # comes with jinja2

    converter = vega()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"amount": format_bytes, "time": format_seconds, "change": _change}
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(
        record=figures.record,
        plain=figures.plain,
        ours=figures.ours,
        names=(PLAIN, OURS),
        device=figures.device,
        live=figures.live,
        charts=_packed(json.dumps({name: converter.vegalite_to_vega(spec) for name, spec in specs.items()})),
        drawn=list(specs),
        still={name: markupsafe.Markup(_plain_svg(converter.vegalite_to_svg(spec))) for name, spec in specs.items()},
        layers=_layer_rows(figures),
        variants=_variants(figures.ours),
        table=_table(figures),
        summary=_summary(figures),
        library=_library(),
    )


def vega() -> Any:
    """The module that compiles and draws Vega-Lite.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise UsageError("a report needs vl-convert-python: pip install 'monet_like[plots]'") from None
    return vl_convert


@cache
def _library() -> str:
    """The JavaScript library Vega, compressed."""
    return _packed(vega().javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _packed(text: str) -> str:
    """A text that only the page's script reads, in half its size: gzip in base64."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


#: What a picture without a pointer has no use for: descriptions, and bands that are seen under a pointer alone.
_POINTED_AT = re.compile(r' (?:aria-[a-z]+|role)="[^"]*"|<path[^>]* opacity="0"[^>]*/>')
_DIGITS = re.compile(r"(\d\.\d)\d+")
_SAME_POINT = re.compile(r"L([-\d.,]+)(?=L\1[LZ])")


def _plain_svg(picture: str) -> str:
    """A drawing in a third of its size, for a page whose scripts do not run: to a tenth of a pixel."""
    return _SAME_POINT.sub("", _DIGITS.sub(r"\1", _POINTED_AT.sub("", picture)).replace(".0", ""))


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")


def _summary(figures: Figures) -> dict[str, Any]:
    """The key numbers at the top of the page."""
    plain, ours, record = figures.plain, figures.ours, figures.record
    again = [run for run in ours.runs if run.again]
    live = figures.live
    found: dict[str, Any] = {
        "again": len(again),
        "again_seconds": sum(run.seconds for run in again),
        "again_share": sum(run.seconds for run in again) / ours.seconds if ours.seconds else 0.0,
        "memory_ratio": ours.peak.total_bytes / plain.peak.total_bytes,
        "time_ratio": ours.seconds / plain.seconds if plain.seconds else 1.0,
        "as_filed": ours.peak.total_bytes == record.peak_bytes,
        "batch": record.inputs[0].shape[0] if record.inputs and record.inputs[0].shape else None,
        "inputs": ", ".join(f"{i.dtype}{list(i.shape)}" for i in record.inputs),
    }
    if live is not None:
        apart = [count - run.total_bytes for run, count in zip(ours.runs, live.bytes, strict=True)]
        most = max(range(len(apart)), key=lambda place: abs(apart[place]))
        found["live"] = {
            "peak": max(live.bytes),
            "ratio": max(live.bytes) / ours.peak.total_bytes,
            "close": sum(abs(d) <= run.total_bytes / 1000 for d, run in zip(apart, ours.runs, strict=True)),
            "most": apart[most],
            "most_at": ours.runs[most],
            "fits": max(*live.bytes, live.loss_bytes) <= record.budget_bytes,
        }
    return found


def _layer_rows(figures: Figures) -> list[dict[str, Any]]:
    """For every layer: its memory at either step's peak, its time, and the time of what runs again."""
    plain, ours = figures.plain, figures.ours
    names = dict.fromkeys(run.layer for run in (*plain.runs, *ours.runs))
    found = []
    for name in dict.fromkeys([*names, *plain.at_peak, *ours.at_peak]):
        mine = [run for run in ours.runs if run.layer == name]
        found.append(
            {
                "name": name,
                "plain": sum(plain.at_peak.get(name, ())),
                "ours": sum(ours.at_peak.get(name, ())),
                "seconds": sum(run.seconds for run in mine),
                "plain_seconds": sum(run.seconds for run in plain.runs if run.layer == name),
                "again": sum(run.seconds for run in mine if run.again),
            }
        )
    return found


def _variants(ours: Course) -> list[tuple[str, int, float]]:
    """(name, runs, seconds) of every variant but PyTorch's own operators."""
    found: dict[str, list[float]] = {}
    for run in ours.runs:
        if run.variant != "aten":
            entry = found.setdefault(run.variant, [0, 0.0])
            entry[0] += 1
            entry[1] += run.seconds
    return sorted(((name, int(runs), seconds) for name, (runs, seconds) in found.items()), key=lambda row: -row[2])


def _table(figures: Figures) -> dict[str, Sequence[Any]]:
    """Every run: column titles, and rows whose numbers stay numbers (bytes and seconds)."""
    columns = [
        ("#", ""), ("phase", ""), ("layer", ""), ("operator", ""), ("time", "seconds"), ("memory", "bytes"),
        ("writes", "bytes"), ("variant", ""), ("task", ""),
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for place, run in enumerate(figures.ours.runs):
        phase = "forward" if run.slot is None else f"again {run.slot}" if run.again else f"backward {run.slot}"
        variant = "" if run.variant == "aten" else run.variant
        seconds = float(f"{run.seconds:.4g}")
        rows.append(
            [place, phase, run.layer, run.operator, seconds, run.total_bytes, run.made_bytes, variant, run.task]
        )
    if figures.live is not None:
        columns.insert(6, ("measured", "bytes"))
        for row, count in zip(rows, figures.live.bytes, strict=True):
            row.insert(6, count)
    return {"columns": columns, "rows": rows}


def numbers(figures: Figures) -> dict[str, Any]:
    """The figures as fields of the JSON output."""

    def course(found: Course) -> dict[str, Any]:
        return {
            "peak_bytes": found.peak.total_bytes,
            "seconds": found.seconds,
            "kept_bytes": found.kept_bytes,
            "peak_task": found.peak.task,
            "peak_by_kind": dict(zip(KINDS, found.peak.bytes, strict=True)),
            "peak_by_layer": {layer: sum(counts) for layer, counts in found.at_peak.items()},
        }

    again = [run for run in figures.ours.runs if run.again]
    return {
        "model": figures.record.model,
        "budget_bytes": figures.record.budget_bytes,
        "device": figures.device,
        "plain": course(figures.plain),
        "schedule": course(figures.ours),
        "reruns": len(again),
        "rerun_seconds": sum(run.seconds for run in again),
        "fronts": {name: [list(point) for point in line] for name, line in figures.fronts.items()},
        "measured_bytes": list(figures.live.bytes) if figures.live else None,
        "measured_seconds": figures.live.seconds if figures.live else None,
    }
