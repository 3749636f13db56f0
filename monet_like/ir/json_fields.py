"""Fields of dataclasses in JSON files: written under a header, and read with their types checked."""

from __future__ import annotations

import math
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}


def headed(record: Any, form: str, version: int, *, without: str) -> dict[str, Any]:
    """The fields of a dataclass as the head of a file's content: format, version, and all but the field ``without``."""
    fields = {name: value for name, value in vars(record).items() if name != without}
    return {"format": form, "version": version, **fields}


def typed(value: Any, kind: str) -> Any:
    """A value that was read, as the type of that name: ``str``, ``int``, ``float``, ``bool`` or ``tuple[int, ...]`` of them.

    Lists become tuples; a whole number is a float, too.

    Raises:
        TypeError: it has another type, or is no finite number.
    """
    if kind.startswith("tuple["):
        inner = kind.removeprefix("tuple[").removesuffix("]").removesuffix(", ...")
        if type(value) is not list:
            raise TypeError(f"a field holds {type(value).__name__}, not a list")
        return tuple(typed(part, inner) for part in value)
    if type(value) not in _KINDS[kind] or (kind == "float" and not math.isfinite(value)):
        raise TypeError(f"a field holds {type(value).__name__}, not {kind}")
    return value
