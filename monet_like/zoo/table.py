"""The zoo as a Markdown table, between two markers of a file, made from the registry alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..files import write_atomically
from ..units import GIB, format_seconds
from .registry import Listed, Registry

BEGIN, END = "<!-- zoo table: begin (monet-like zoo table) -->", "<!-- zoo table: end -->"


def markdown(registry: Registry) -> str:
    """One table for every model: a row for every budget and profile."""
    parts = []
    for model in dict.fromkeys(_model(listed) for listed in registry.files):
        files = [listed for listed in registry.files if _model(listed) == model]
        plain = files[0].plain_peak_bytes / GIB
        lines = [
            f"### {model}",
            "",
            f"`{files[0].model}`, inputs {', '.join(files[0].inputs)}, mode `{files[0].mode}`; plain PyTorch takes "
            f"{plain:.2f} GB.",
            "",
            "| `zoo:` name | profile | peak | step | against plain | gap | solve |",
            "|---|---|---|---|---|---|---|",
            *(_row(listed) for listed in files),
        ]
        lines += [
            f"| {r.name} | {r.profile} | {'proven infeasible' if r.proven else 'none found'}"
            f"{f'; {r.smallest_bytes / GIB:.2f} GB will do' if r.smallest_bytes else ''} | | | | |"
            for r in registry.refused
            if r.name.startswith(f"{model.replace(', batch ', '_')}_")
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def summary(registry: Registry, profile: str) -> str:
    """One row for every model, at its smallest budget for one profile."""
    rows = ["| model | plain PyTorch | smallest in the zoo | step against plain | schedules |", "|---|---|---|---|---|"]
    for model in dict.fromkeys(_model(listed) for listed in registry.files):
        files = [listed for listed in registry.files if _model(listed) == model and listed.profile == profile]
        if files:
            least = min(files, key=lambda listed: listed.peak_bytes)
            rows.append(
                f"| {model} | {least.plain_peak_bytes / GIB:.2f} GB | {least.peak_bytes / GIB:.2f} GB "
                f"| {_percent(least.overhead)} | {len(files)} |"
            )
    return "\n".join(rows)


def write_into(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put ``text`` between two markers of a file.

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


def _row(listed: Listed) -> str:
    gap = "none proven" if listed.gap is None else f"{100 * listed.gap:.1f} %"
    gap += "" if listed.bound_kind in ("unrestricted", "none") else " (restricted)"
    cells: Sequence[str] = (
        listed.name,
        listed.profile if listed.kind == "roofline" else f"{listed.profile} (measured)",
        f"{listed.peak_bytes / GIB:.2f} GB",
        format_seconds(listed.seconds),
        _percent(listed.overhead),
        gap,
        f"{listed.solve_seconds:.1f} s",
    )
    return f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "\N{MINUS SIGN}")
