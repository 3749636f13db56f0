"""The recipes of docs/other_machinery.md are short, and they run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "other_machinery.md"
RECIPES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_a_recipe_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()  # a process of its own would know nothing of the graphs of other tests
    names: dict[str, object] = {}
    with torch._dynamo.config.patch(enable_invoke_subgraph_regional_compile=False):  # a recipe changes it
        exec(RECIPES[number], names)
    if "trainer" in names:  # it has dropped the gradients
        assert names["trainer"].state.global_step == 2  # type: ignore[attr-defined]
        return
    trained = [p for p in names["model"].parameters() if p.grad is not None]  # type: ignore[attr-defined]
    assert len(trained) == len(list(names["model"].parameters()))  # type: ignore[attr-defined]


def test_recipes_are_short() -> None:
    assert RECIPES
    assert [recipe for recipe in RECIPES if len([line for line in recipe.splitlines() if line]) > 15] == []
