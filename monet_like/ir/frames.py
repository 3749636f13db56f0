"""Tables as pandas DataFrames, and as CSV files. Importing this module does not import pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_atomically

if TYPE_CHECKING:
    import pandas


def frame(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> pandas.DataFrame:
    """A DataFrame with a row for each of ``rows``.

    Args:
        columns: their names, with the unit at the end (``seconds``, ``peak_bytes``), and dtypes: ``Int64`` and ``float64``
            for numbers that may be missing (None), ``int64``, ``bool``, ``object`` for text.
        rows: of as many cells as there are columns.
    """
    import pandas

    cells = list(rows)
    made = {
        name: pandas.Series([row[place] for row in cells], dtype=dtype)
        for place, (name, dtype) in enumerate(columns.items())
    }
    return pandas.DataFrame(made, columns=list(columns))


def csv_text(table: pandas.DataFrame) -> str:
    """A table as CSV: a header, one line a row, numbers with all their digits, nothing where a value is missing."""
    return str(table.to_csv(index=False, lineterminator="\n"))


def write_csv(table: pandas.DataFrame, path: Path) -> None:
    """Write a table as a CSV file, whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    write_atomically(path, csv_text(table).encode())
