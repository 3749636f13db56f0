"""From the rows of `benchmarks.run` to Markdown and plots. Every word about who is ahead is made from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import CONTENDERS
from benchmarks.rows import Point, Trial, markdown_table
from benchmarks.work import WORK, Job
from monet_like.files import write_atomically

MB = 10**6
#: What counts as equal: shares of peak and of time.
SAME_PEAK, SAME_TIME = 0.01, 0.02
#: Goals: of predictions, of the batch under a limit, and of its seconds per sample.
PEAK_GOAL, TIME_GOAL, BATCH_GOAL, OVERHEAD_GOAL = 0.01, 0.05, 3.0, 0.10
PLAIN, PROBE = "plain PyTorch", "dropout"
FRONTS = ("eager", "inductor")
#: Of the plots; no two kinds of front are drawn in one.
OTHERS_COLOURS = (
    *("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:gray", "tab:olive", "tab:cyan"),
    *("navy", "darkgreen", "goldenrod", "indigo"),
)
OUR_COLOURS = ("lightcoral", "crimson", "deeppink", "darkred")


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that none of the others equals in memory and beats in time, or the other way, by rising peak."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.ratio)):
        if not front or point.ratio < front[-1].ratio:
            front.append(point)
    return front


def trusted(points: Sequence[Point]) -> list[Point]:
    """The points, those that only finite differences speak for not being right where the net of dropout
    says otherwise.
    """
    wrong = {(p.contender, p.setting) for p in points if p.model == PROBE and p.status == "measured" and not p.correct}
    return [
        replace(p, correct=False) if p.checked != PLAIN and (p.contender, p.setting) in wrong else p for p in points
    ]


def usable(points: Sequence[Point], kind: str, *, ours: bool) -> list[Point]:
    """Measured points with right gradients of one kind of execution: ours, or the others'."""
    return [
        p for p in points
        if p.status == "measured" and p.correct
        and CONTENDERS[p.contender].front == kind and CONTENDERS[p.contender].is_ours is ours
    ]  # fmt: skip


def behind(points: Sequence[Point], kind: str) -> list[str]:
    """Where ours is above the front of all others, in words; nothing where it is on or below it."""
    mine, told = usable(points, kind, ours=True), []
    if not mine:
        return ["none of ours was measured with right gradients"]
    for other in pareto(usable(points, kind, ours=False)):
        told_as = f"{other.label} ({_mb(other.peak_bytes)}, {_change(other.ratio)})"
        fitting = [p for p in mine if p.peak_bytes <= (1 + SAME_PEAK) * other.peak_bytes]
        best = min(fitting, key=lambda p: p.ratio, default=None)
        if best is None:
            least = min(p.peak_bytes for p in mine)
            told.append(f"{told_as} needs less memory than any of ours, the least of which is {_mb(least)}")
        elif best.ratio > (1 + SAME_TIME) * other.ratio:
            told.append(
                f"{told_as} is faster than the fastest of ours with no more memory, {best.label} "
                f"({_mb(best.peak_bytes)}, {_change(best.ratio)}), by {_share(1 - other.ratio / best.ratio)}"
            )
    return told


def _mb(count: float) -> str:
    return f"{count / MB:,.0f} MB"


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _name(model: str, batch: int, suite: str) -> str:
    what = Job(model, suite, batch, PLAIN).size.what
    return f"{model}, batch {batch}, {what}"


def _order(point: Point) -> tuple[int, int, int]:
    contender = CONTENDERS[point.contender]
    known = contender.settings.index(point.setting) if point.setting in contender.settings else len(contender.settings)
    return list(CONTENDERS).index(point.contender), known, -point.peak_bytes


def _points_table(points: Sequence[Point], suite: str) -> str:
    process = "process" if suite == "cpu" else "reserved"
    heads = ("", "peak", process, "step, median", "± quartiles", "against plain", "planned in", "gradients")
    rows = []
    for p in sorted(points, key=_order):
        if p.status != "measured":
            rows.append((p.label, "-", "-", "-", "-", "-", "-", f"{p.status}: {_escaped(p.reason)}"))
            continue
        right = "right" if p.correct else "**wrong**"
        against = "" if p.checked == PLAIN else f", {p.checked}"
        rows.append(
            (
                p.label, _mb(p.peak_bytes), _mb(p.process_bytes), f"{1e3 * p.seconds:,.0f} ms",
                f"{1e3 * p.spread_seconds:,.0f} ms", _change(p.ratio), f"{p.planning_seconds:,.1f} s",
                f"{right}, {p.gradient_error:.0e}{against}" if p.gradient_error else "equal",
            )
        )  # fmt: skip
    return markdown_table(heads, rows) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _words(points: Sequence[Point]) -> str:
    lines = []
    for kind in FRONTS:
        if not usable(points, kind, ours=False):
            continue
        if not any(CONTENDERS[p.contender].is_ours for p in points):
            lines += [f"* {kind}: none of ours was run."]
            continue
        told = behind(points, kind)
        if told:
            lines += [f"* {kind}: ours is not on or below the others' front everywhere:"]
            lines += [f"    * {line}." for line in told]
        else:
            lines += [f"* {kind}: ours is on or below the front of all others everywhere."]
    wrong = [p.label for p in points if p.status == "measured" and not p.correct]
    if wrong:
        lines += [f"* not on any front, their gradients being wrong: {', '.join(wrong)}."]
    return "\n".join(lines) + "\n"


def planned(points: Sequence[Point]) -> list[Point]:
    """Measured points of the models with what was promised for them."""
    return [p for p in points if p.predicted_bytes and p.status == "measured" and p.model in WORK]


def accuracy(points: Sequence[Point]) -> str:
    """How far what was promised is from what was measured, in words. Times of compiled pieces are not promised."""
    told = [_within("Peak", [p.predicted_bytes / p.peak_bytes - 1 for p in points], PEAK_GOAL)]
    timed = [p for p in points if CONTENDERS[p.contender].front == "eager"]
    if timed:
        told += _times_within(timed)
        as_profiled = [p for p in timed if abs(_pace(p) - 1) <= TIME_GOAL]
        pace = (
            f"Where plain PyTorch's own step was within {_share(TIME_GOAL)} of its prediction, the machine as profiled"
        )
        told.append(f"{pace}: {' '.join(_times_within(as_profiled)) if as_profiled else 'no point.'}")
    return " ".join(told)


def _times_within(points: Sequence[Point]) -> list[str]:
    return [
        _within("Step time", [p.predicted_seconds / p.seconds - 1 for p in points], TIME_GOAL),
        _within("In units of plain PyTorch's step", [_calibrated(p) - 1 for p in points], TIME_GOAL),
    ]


def _within(what: str, errors: Sequence[float], goal: float) -> str:
    sizes = [abs(error) for error in errors]
    close = sum(size <= goal for size in sizes)
    return f"{what} within {_share(goal)} for {close} of {len(sizes)} points, at most {_share(max(sizes))} off."


def _calibrated(point: Point) -> float:
    """Predicted to measured seconds, both in units of plain PyTorch's: its own error and the machine's
    pace drop out.
    """
    return point.predicted_seconds / point.seconds / _pace(point)


def _pace(point: Point) -> float:
    """Plain PyTorch's predicted to measured seconds: how much faster the machine was than when it was profiled."""
    return point.predicted_plain_seconds / point.plain_seconds


def _predictions(points: Sequence[Point]) -> str:
    found = planned(points)
    if not found:
        return "Not measured.\n"
    rows = []
    for p in sorted(found, key=lambda p: (list(WORK).index(p.model), p.batch, _order(p))):
        timed = CONTENDERS[p.contender].front == "eager"
        rows.append(
            (
                f"{p.model}, batch {p.batch}", p.label, _mb(p.predicted_bytes), _mb(p.peak_bytes),
                f"{100 * (p.predicted_bytes / p.peak_bytes - 1):+.2f} %",
                f"{1e3 * p.predicted_seconds:,.0f} ms", f"{1e3 * p.seconds:,.0f} ms",
                _change(p.predicted_seconds / p.seconds) if timed else "-", _change(_calibrated(p)) if timed else "-",
                _change(_pace(p)), _share(p.gap) if p.gap >= 0 else "-",
            )
        )  # fmt: skip
    heads = (
        "model", "", "predicted peak", "measured", "off", "predicted step", "measured", "off", "off, relative to plain",
        "plain's off", "gap",
    )  # fmt: skip
    return f"{accuracy(found)}\n\n{markdown_table(heads, rows)}\n"


def _batches(trials: Sequence[Trial]) -> str:
    if not trials:
        return "Not measured.\n"
    text = ""
    for model in dict.fromkeys(t.model for t in trials):
        here = [t for t in trials if t.model == model]
        limit, base = here[0].limit_bytes, here[0].plain_batch
        rows, largest = [], {}
        for name in CONTENDERS:
            tried = [t for t in here if t.contender == name]
            fitting = sorted((t for t in tried if t.status == "fits"), key=lambda t: t.batch)
            if not tried:
                continue
            more = [
                t
                for t in tried
                if t.status in ("died", "over", "refused", "not found") and (not fitting or t.batch > fitting[-1].batch)
            ]
            next_one = min(more, key=lambda t: t.batch, default=None)
            beyond = (
                f"{next_one.batch} {next_one.status}: {_escaped(next_one.reason)}" if next_one else "not sought further"
            )
            label = f"{name} {tried[0].setting}".strip()
            if not fitting:
                rows.append((label, "-", "-", "-", f"{tried[0].batch} {tried[0].status}: {_escaped(tried[0].reason)}"))
                continue
            largest[name] = fitting[-1].batch
            cheap = [t for t in fitting if t.overhead <= OVERHEAD_GOAL]
            rows.append(
                (label, str(fitting[-1].batch), _change(1 + fitting[-1].overhead),
                 f"{cheap[-1].batch} ({_change(1 + cheap[-1].overhead)})" if cheap else "-", beyond)
            )  # fmt: skip
        slower = f"largest at most {_share(OVERHEAD_GOAL)} slower"
        heads = ("", "largest batch", "time per sample", slower, "the next one tried")
        text += f"{model}: {_mb(limit)} a step, which plain PyTorch's batch {base} just fits.\n\n"
        text += markdown_table(heads, rows) + "\n\n"
        if "monet_like" in largest and PLAIN in largest:
            cheap = [t.batch for t in here if t.contender == "monet_like" and t.status == "fits"
                     and t.overhead <= OVERHEAD_GOAL]  # fmt: skip
            times = max(cheap, default=0) / largest[PLAIN]
            verdict = "reached" if times >= BATCH_GOAL else "not reached"
            text += (
                f"{times:.1f} times plain PyTorch's largest batch at no more than {_share(OVERHEAD_GOAL)} further time "
                f"per sample, {largest['monet_like'] / largest[PLAIN]:.1f} times at any; the goal of {BATCH_GOAL:.0f} "
                f"times is {verdict}.\n\n"
            )
    return text


def plotted(points: Sequence[Point]) -> list[str]:
    """The fronts of which there is something to draw."""
    return [kind for kind in FRONTS if usable(points, kind, ours=False) or usable(points, kind, ours=True)]


def plot(points: Sequence[Point], title: str, path: Path) -> None:
    """Time against peak of all contenders of one model, one picture for eager and one for inductor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = plotted(points)
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(7.5 * len(kinds), 5), squeeze=False, sharey=True)
    plain = [p for p in points if p.contender == PLAIN]
    for kind, axis in zip(kinds, axes[0], strict=True):
        shown = [p for p in points if p.status == "measured" and CONTENDERS[p.contender].front == kind]
        others, own = iter(OTHERS_COLOURS), iter(OUR_COLOURS)
        for name in dict.fromkeys(p.contender for p in sorted((*plain, *shown), key=_order)):
            mine = sorted((p for p in {*plain, *shown} if p.contender == name), key=lambda p: p.peak_bytes)
            is_ours = CONTENDERS[name].is_ours
            colour = "black" if name == PLAIN else next(own if is_ours else others)
            right, wrong = ([p for p in mine if p.correct is flag] for flag in (True, False))
            marker, size = ("*", 13) if name == PLAIN else ("o", 7) if is_ours else ("s", 5)
            if right:
                look: dict[str, Any] = {"color": colour, "zorder": 4 if is_ours else 3}
                line, width = ("-", 2.2) if is_ours else (":", 1)
                front = pareto(right)
                axis.plot([p.peak_bytes / MB for p in front], [p.ratio for p in front], line, linewidth=width, **look)
                axis.plot(
                    [p.peak_bytes / MB for p in right], [p.ratio for p in right], marker,
                    markersize=size, label=name, **look
                )  # fmt: skip
            if wrong:
                label = f"{name}: wrong gradients"
                axis.plot([p.peak_bytes / MB for p in wrong], [p.ratio for p in wrong], "x", color=colour, label=label)
        axis.set(title=f"{title}: {kind}", xlabel="peak of a step, MB")
        axis.axhline(1, color="0.8", linewidth=0.8, zorder=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)
    axes[0][0].set_ylabel("step time, plain PyTorch = 1")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": ""})
    pyplot.close(figure)


def write_report(folder: Path, suite: str, points: Sequence[Point], trials: Sequence[Trial]) -> None:
    """Write ``rivals.md`` and a plot a model."""
    points = trusted(points)
    threads = f"{torch.get_num_threads()} CPU threads" if suite == "cpu" else torch.cuda.get_device_name()
    dtype = "bfloat16 autocast and channels-last" if suite == "gpu16" else "float32"
    versions = " and ".join(sorted({row.torch for row in (*points, *trials)} - {""})) or torch.__version__
    text = (
        f"# `python -m benchmarks.run --suite {suite}`\n\n"
        f"{threads}, torch {versions}, {dtype}. Every contender in a process of its own, its steps in turn with plain "
        "PyTorch's; peaks count parameters, buffers, gradients and inputs. Where gradients can be checked by finite "
        "differences only, which small masks hardly change (ConvNeXt's), wrong is also who is wrong in the net of "
        "dropout, at the end.\n"
    )
    if suite == "cpu":
        text += "Steps are timed under a malloc that keeps what is freed, as CUDA's caching allocator does.\n"
    load = max((p.load for p in points), default=0.0)
    if suite == "cpu" and points:
        busy = "other work ran beside some of it" if load > torch.get_num_threads() + 1.5 else "nothing else ran"
        text += f"Load average at most {load:.1f} when steps were over: {busy}.\n"
    for model, batch in dict.fromkeys((p.model, p.batch) for p in points if p.model in WORK):
        here = [p for p in points if (p.model, p.batch) == (model, batch)]
        name = _name(model, batch, suite)
        text += f"\n## {name}\n\n{_points_table(here, suite)}\n{_words(here)}"
        if plotted(here):
            picture = Path("plots") / f"{model}_{batch}.png"
            plot(here, name, folder / picture)
            text += f"\n![time against peak]({picture})\n"
    aside = [p for p in points if p.model == PROBE]
    text += "\n## Gradients with dropout on\n\n"
    text += (
        f"Six residual layers with dropout, {Job(PROBE, suite, 1, PLAIN).size.what}.\n\n"
        if aside
        else "Not measured.\n"
    )
    if aside:
        rows = [
            (p.label, f"{p.gradient_error:.1e}", p.checked, "right" if p.correct else "**wrong**")
            if p.status == "measured" else (p.label, "-", "-", f"{p.status}: {_escaped(p.reason)}")
            for p in sorted(aside, key=_order)
        ]  # fmt: skip
        text += markdown_table(("", "error of the gradients, relative", "against", ""), rows) + "\n"
    text += f"\n## Predicted and measured\n\n{_predictions(points)}"
    text += f"\n## The largest batch under a limit\n\n{_batches(trials)}"
    write_atomically(folder / "rivals.md", (text.rstrip() + "\n").encode())
