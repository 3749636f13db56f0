"""Tables as pandas DataFrames, and as CSV files. Importing this module does not import pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_atomically

if TYPE_CHECKING:
    import pandas


def frame(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> pandas.DataFrame:
    """A DataFrame with a row for each of ``rows``.

    Args:
        columns: their names, with the unit at the end (``seconds``, ``peak_bytes``), and dtypes: ``Int64`` and
            ``float64`` for numbers that may be missing (None), ``int64``, ``bool``, ``object`` for text.
        rows: of as many cells as there are columns.
    """
    import pandas

    cells = list(rows)
    made = {
        name: pandas.Series([row[place] for row in cells], dtype=dtype)
        for place, (name, dtype) in enumerate(columns.items())
    }
    return pandas.DataFrame(made, columns=list(columns))


#: Dtypes of a dataclass's fields by their annotations; of all others ``object``.
_DTYPES = {
    **{"int": "int64", "float": "float64", "bool": "bool"},
    **{"int | None": "Int64", "float | None": "float64", "bool | None": "boolean"},
}


def dtypes_of(kind: type) -> dict[str, str]:
    """The columns of a table with a row for each object of a dataclass: its fields, and their dtypes."""
    return {field.name: _DTYPES.get(str(field.type), "object") for field in fields(kind)}


def frame_of(kind: type, rows: Iterable[Any]) -> pandas.DataFrame:
    """A DataFrame with a row for each of ``rows``, which are of the dataclass ``kind``; lists become text."""

    def cell(value: Any) -> Any:
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value

    columns = dtypes_of(kind)
    return frame(columns, ([cell(getattr(row, name)) for name in columns] for row in rows))


def csv_text(table: pandas.DataFrame) -> str:
    """A table as CSV: a header, one line a row, numbers with all their digits, nothing where a value is missing."""
    return str(table.to_csv(index=False, lineterminator="\n"))


def write_csv(table: pandas.DataFrame, path: Path) -> None:
    """Write a table as a CSV file, whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    write_atomically(path, csv_text(table).encode())
