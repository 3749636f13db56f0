"""How the zoo's schedules differ from those of an earlier registry, as a Markdown table.

    git show REVISION:solutions/registry.json > before.json
    python -m benchmarks.zoo_changes before.json

All figures are predicted. GB are 2**30 bytes. One value in a cell: unchanged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from monet_like.files import shipped_folder
from monet_like.ir.units import format_bytes, format_seconds

Rows = dict[tuple[str, str], dict[str, Any]]


def rows(registry: Path) -> Rows:
    """The schedules of a registry by name and profile, in its order."""
    return {(row["name"], row["profile"]): row for row in json.loads(registry.read_text())["schedules"]}


def both(before: str, now: str) -> str:
    """Two values, or one if they are equal."""
    return now if before == now else f"{before} → {now}"


def table(before: Rows, now: Rows) -> list[str]:
    """A line for every schedule that both have and whose figures differ."""

    def overhead(row: dict[str, Any]) -> str:
        return f"{100 * (row['seconds'] / row['plain_seconds'] - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")

    lines = ["| schedule | profile | peak | step | against plain PyTorch |", "|---|---|---|---|---|"]
    for (name, profile), new in now.items():
        old = before.get((name, profile))
        cells = [] if old is None else [
            both(format_bytes(old["peak_bytes"]), format_bytes(new["peak_bytes"])),
            both(format_seconds(old["seconds"]), format_seconds(new["seconds"])),
            both(overhead(old), overhead(new)),
        ]  # fmt: skip
        if any("→" in cell for cell in cells):
            lines.append(f"| {name} | {profile} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    folder = shipped_folder("solutions")
    assert folder is not None
    print("\n".join(table(rows(Path(sys.argv[1])), rows(folder / "registry.json"))))
