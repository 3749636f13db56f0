"""A short ``repr`` of dataclasses that hold a lot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields
from typing import Any

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
