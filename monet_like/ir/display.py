"""How objects are shown: HTML tables in notebooks, and a short ``repr`` of dataclasses that hold a lot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields
from html import escape
from itertools import islice
from typing import Any

#: Rows that a table shows; further rows are only counted.
MOST_ROWS = 30
#: Characters of a field in a short ``repr``, and members of a collection that is not only counted.
MOST_CHARACTERS, MOST_MEMBERS = 100, 4


def short_repr(self: Any) -> str:
    """The ``__repr__`` of a dataclass that would fill screens: long collections are counted, long texts cut."""
    parts = (f"{field.name}={_shortened(getattr(self, field.name))}" for field in fields(self) if field.repr)
    return f"{type(self).__name__}({', '.join(parts)})"


def _shortened(value: object) -> str:
    if isinstance(value, Sequence | Mapping | Set) and not isinstance(value, str) and len(value) > MOST_MEMBERS:
        return f"<{len(value)} in a {type(value).__name__}>"
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


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
