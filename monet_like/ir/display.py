"""HTML tables with which notebooks show a program, a profile, a plan, a schedule and a schedule record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

#: Rows that a table shows; further rows are only counted.
MOST_ROWS = 30


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> str:
    """One table.

    Args:
        caption: stands above it; the object's one-line ``repr``.
        rows: of as many cells as the header.
        count: how many rows there are. The first `MOST_ROWS` are shown.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in islice(rows, MOST_ROWS)
    )
    more = f"<tr><td colspan={len(header)}>{count - MOST_ROWS} more</td></tr>" if count > MOST_ROWS else ""
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}{more}</tbody></table>"
    )
