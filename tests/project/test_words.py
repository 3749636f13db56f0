"""The first pages that people read have short sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import textstat
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
#: Words of a sentence: on average fewer than the first number, and never more than the second.
AVERAGE, MOST = 25, 35
#: The end of a sentence, where another one may begin. A figure such as 5.4 has no space in it.
END = re.compile(r"(?<=[.!?])\)?\s+")


def texts(markdown: str) -> Iterator[tuple[bool, str]]:
    """The text of each paragraph, point of a list and cell of a table, and whether it is a cell; without code blocks,
    and code inside a line counts as one word.
    """
    inside_table = False
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type in ("table_open", "table_close"):
            inside_table = token.type == "table_open"
        elif token.type == "inline":
            yield (
                inside_table,
                "".join(
                    {"softbreak": " ", "code_inline": "code", "image": ""}.get(part.type, part.content)
                    for part in token.children or ()
                ),
            )


def sentences(markdown: str) -> list[str]:
    return [sentence for _, text in texts(markdown) for sentence in END.split(text) if sentence.strip()]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_sentences_are_short(page: str) -> None:
    markdown = (ROOT / page).read_text()
    prose = " ".join(text for is_cell, text in texts(markdown) if not is_cell)
    assert textstat.words_per_sentence(prose) < AVERAGE
    assert not [sentence for sentence in sentences(markdown) if len(sentence.split()) > MOST]


def test_long_sentences_are_found() -> None:
    """Of a text in a list, over two lines, with code, a link and a table."""
    long = " ".join(["word"] * 20)
    text = f"* {long}\n  and `some code` in [{long}](page.md). Short: yes.\n\n| a |\n|---|\n| {long} {long} |\n"
    assert [len(sentence.split()) for sentence in sentences(text)] == [43, 2, 1, 40]
