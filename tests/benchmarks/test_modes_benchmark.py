"""The page of benchmarks.modes: whose tables there are, and how one is replaced."""

from __future__ import annotations

import re

from benchmarks.certified import MODELS
from benchmarks.modes import MONET_MODES, PAGE, with_table


def test_every_table_has_every_mode() -> None:
    _, *tables = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    assert tables
    for table in tables:
        name, batch = re.match(r"(\w+), batch (\d+)", table).groups()  # type: ignore[union-attr]
        assert MODELS[name][1] == int(batch)
        assert re.findall(r"^\| (\w+) ", table, re.MULTILINE) == ["mode", *MONET_MODES]


def test_a_table_is_replaced_where_it_stands_or_added() -> None:
    page = with_table(with_table("# Title\n\nWords.\n", ["## a", "", "old"]), ["## b", "", "other"])
    assert page == "# Title\n\nWords.\n\n## a\n\nold\n\n## b\n\nother\n"
    assert with_table(page, ["## a", "", "new"]) == page.replace("old", "new")
