"""The first pages that people read have short sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
#: Words of a sentence: on average fewer than the first number, and never more than the second.
AVERAGE, MOST = 25, 35
#: The end of a sentence, where another one may begin. A figure such as 5.4 has no space in it.
END = re.compile(r"(?<=[.!?:])\)?\s+")


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of all paragraphs and lists, without tables and code blocks; code inside a line counts
    as one word.
    """
    inside_table = False
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type in ("table_open", "table_close"):
            inside_table = token.type == "table_open"
        elif token.type == "inline" and not inside_table:
            text = "".join(
                {"softbreak": " ", "code_inline": "code", "image": ""}.get(part.type, part.content)
                for part in token.children or ()
            )
            yield from filter(None, map(str.strip, END.split(text)))


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_sentences_are_short(page: str) -> None:
    found = list(sentences((ROOT / page).read_text()))
    assert mean(len(sentence.split()) for sentence in found) < AVERAGE
    assert not [sentence for sentence in found if len(sentence.split()) > MOST]


def test_long_sentences_are_found() -> None:
    """Of a text in a list, over two lines, with code, a link and a table."""
    long = " ".join(["word"] * 20)
    text = f"* {long}\n  and `some code` in [{long}](page.md). Short: yes.\n\n| a |\n|---|\n| {long} {long} |\n"
    assert [len(sentence.split()) for sentence in sentences(text)] == [43, 1, 1]
