"""Writes the zoo's registry as Markdown tables, between two markers of a file."""

from __future__ import annotations

from pathlib import Path

from ...errors import UsageError
from ...files import write_atomically
from ...ir.units import GIB, format_seconds
from ...zoo.registry import Registry
from ...zoo.rows import Listed, Refused, place

BEGIN, END = "<!-- zoo table: begin (monet-like zoo table) -->", "<!-- zoo table: end -->"


def markdown(registry: Registry) -> str:
    """One table for every model: a row for every budget, a column for every profile."""
    parts = []
    for model in dict.fromkeys(_model(listed) for listed in registry.schedules):
        schedules = [listed for listed in registry.schedules if _model(listed) == model]
        refused = [r for r in registry.refused if r.name.startswith(f"{model.replace(', batch ', '_')}_")]
        rows: list[Listed | Refused] = [*schedules, *refused]
        profiles = list(dict.fromkeys(row.profile for row in sorted(rows, key=place)))
        measured = {listed.profile for listed in schedules if listed.kind == "measured"}
        plain = sorted({round(listed.plain_peak_bytes / GIB, 2) for listed in schedules})
        budgets = {row.name: row.budget_bytes for row in rows}
        cells = {row.full_name: _cell(row) for row in rows}
        parts.append(
            "\n".join(
                (
                    f"## {model}",
                    "",
                    f"`{schedules[0].model}`, inputs {', '.join(schedules[0].inputs)}, mode `{schedules[0].mode}`; "
                    f"plain PyTorch takes {' to '.join(f'{peak:.2f}' for peak in sorted({plain[0], plain[-1]}))} GB. "
                    f"Files: {', '.join(f'[{path}]({path})' for path in dict.fromkeys(s.path for s in schedules))}.",
                    "",
                    f"| `zoo:` name | {' | '.join(p + ' (measured)' * (p in measured) for p in profiles)} |",
                    "|---" * (1 + len(profiles)) + "|",
                    *(
                        f"| {name} | {' | '.join(cells.get(f'{name}@{profile}', '') for profile in profiles)} |"
                        for name in sorted(budgets, key=lambda name: -budgets[name])
                    ),
                )
            )
        )
    return "\n\n".join(parts)


def _cell(row: Listed | Refused) -> str:
    """A table cell: peak, step time and overhead over plain PyTorch; or the reason why there is no schedule."""
    if isinstance(row, Refused):
        less = f"; {row.smallest_bytes / GIB:.2f} GB will do" if row.smallest_bytes else ""
        return f"{'proven infeasible' if row.proven else 'none found'}{less}"
    return f"{row.peak_bytes / GIB:.2f} GB, {format_seconds(row.seconds)}, {_percent(row.overhead)}"


def summary(registry: Registry, profile: str) -> str:
    """One row for every model, at its smallest budget for one profile."""
    rows = ["| model | plain PyTorch | smallest in the zoo | step against plain | schedules |", "|---|---|---|---|---|"]
    for model in dict.fromkeys(_model(listed) for listed in registry.schedules):
        schedules = [listed for listed in registry.schedules if _model(listed) == model and listed.profile == profile]
        if schedules:
            least = min(schedules, key=lambda listed: listed.peak_bytes)
            rows.append(
                f"| {model} | {least.plain_peak_bytes / GIB:.2f} GB | {least.peak_bytes / GIB:.2f} GB "
                f"| {_percent(least.overhead)} | {len(schedules)} |"
            )
    return "\n".join(rows)


def write_into(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace the text between two markers of a file.

    Raises:
        UsageError: the file is missing, or has not both markers once, in this order.
    """
    try:
        whole = path.read_text()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text; give a Markdown file") from None
    if whole.count(begin) != 1 or whole.count(end) != 1 or whole.index(begin) > whole.index(end):
        raise UsageError(f"{path} needs the lines {begin} and {end}, once each; the table goes between them")
    before, after = whole.split(begin)[0], whole.split(end)[1]
    write_atomically(path, f"{before}{begin}\n\n{text}\n\n{end}{after}".encode())


def _model(listed: Listed) -> str:
    """``resnet50, batch 184``."""
    name = listed.name.removesuffix(f"_{listed.batch}_{listed.budget_bytes / GIB:.2f}")
    return f"{name}, batch {listed.batch}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "\N{MINUS SIGN}")
