"""The list of planted faults is whole and true: each text is there once, each part of a key and each check has a fault;
some are planted.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from scripts.mutants import ROOT, source
from scripts.mutants_list import MUTANTS, Mutant

#: Functions whose tuples are keys: each element of each tuple is a part.
KEYS = [
    ("replay/checks/call_keys.py", "structure"),
    ("replay/checks/call_keys.py", "arguments"),
    ("replay/checks/call_keys.py", "hashable"),
    ("replay/stepping.py", "_key"),
    ("auto/shared_captures.py", "outline_of"),
    ("auto/shared_captures.py", "_look"),
]
#: Files in which each refusal under a condition is a check of a call.
CHECKS = ["checks/changed_inputs", "checks/backward_checks", "checks/transforms", "training_step"]


def of_file(file: str) -> list[Mutant]:
    """The mutants of one file."""
    return [mutant for mutant in MUTANTS if mutant.file == file]


def parsed(file: str) -> tuple[str, ast.Module]:
    """The text of a file of the package, and its tree."""
    text = (ROOT / "monet_like" / file).read_text()
    return text, ast.parse(text)


def removed(text: str, node: ast.AST, mutants: list[Mutant]) -> bool:
    """Whether a mutant replaces what stands at a node by something without it."""
    part = ast.get_source_segment(text, node) or ""
    lines = text.splitlines(keepends=True)
    place = sum(map(len, lines[: node.lineno - 1])) + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
    for mutant in mutants:
        start = text.index(mutant.text)
        within = start <= place < start + len(mutant.text) or place <= start < place + len(part)
        if within and not re.search(rf"(?<!\w){re.escape(part)}(?!\w)", mutant.instead):
            return True
    return False


def parts_of_keys() -> Iterator[tuple[str, str, ast.AST]]:
    """(file, its text, node) of every part."""
    for file, name in KEYS:
        text, tree = parsed(file)
        (function,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        tuples = {ast.unparse(node.targets[0]) for node in assigned if isinstance(node.value, ast.Tuple)}
        values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return | ast.Assign) and node.value]
        values += [
            arg
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and "append" in ast.dump(node.func)
            for arg in node.args
        ]
        for value in values:
            if isinstance(value, ast.Tuple):
                named = [part for part in value.elts if ast.unparse(part).lstrip("*") not in tuples]
                yield from ((file, text, part) for part in named if not isinstance(part, ast.Constant))
    text, tree = parsed("capture/guards/settings.py")
    (settings,) = [node for node in ast.walk(tree) if isinstance(node, ast.Dict) and len(node.keys) > 5]
    yield from (("capture/guards/settings.py", text, value) for value in settings.values)


def conditions_of_refusals() -> Iterator[tuple[str, str, ast.AST]]:
    """(file, its text, node) of the condition under which each error is raised."""
    for name in CHECKS:
        file = f"replay/{name}.py"
        text, tree = parsed(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and any(isinstance(line, ast.Raise) for line in node.body):
                yield file, text, node.test


def test_each_text_is_there_once_and_each_test_exists() -> None:
    for mutant in MUTANTS:
        assert source(mutant).read_text().count(mutant.text) == 1, mutant
        assert mutant.text != mutant.instead
        path, _, name = mutant.test.partition("[")[0].partition("::")
        assert f"def {name}" in (ROOT / "tests" / path).read_text(), mutant
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS)


def test_each_part_of_a_key_has_a_mutant() -> None:
    parts = list(parts_of_keys())
    assert len(parts) > 50
    left = [f"{file}: {ast.unparse(node)}" for file, text, node in parts if not removed(text, node, of_file(file))]
    assert not left, f"scripts/mutants_list.py removes none of {left}"


def test_each_refusal_has_a_mutant() -> None:
    found = list(conditions_of_refusals())
    assert len(found) > 5
    left = [f"{file}: {ast.unparse(node)}" for file, text, node in found if not removed(text, node, of_file(file))]
    assert not left, f"scripts/mutants_list.py removes none of {left}"


def test_each_kind_of_holder_has_a_mutant() -> None:
    text, tree = parsed("capture/guards/holders.py")
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name not in ("Holder", "Drawn")]
    left = [kind.name for kind in kinds if not removed(text, kind, of_file("capture/guards/holders.py"))]
    assert len(kinds) > 10 and not left, f"scripts/mutants_list.py plants nothing in {left}"


def planted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "scripts.mutants", *arguments], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_some_mutants_are_killed() -> None:
    done = planted("--every", "36")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed ") == len(MUTANTS[::36])


@pytest.mark.slow
def test_a_fault_that_no_test_sees_is_told() -> None:
    """And one that is in a process that the test starts is seen."""
    code = (
        "from scripts import mutants as m; test = 'replay/test_step_key.py::test_a_key_keeps_no_module_alive'; "
        "inside = 'ops/test_operators.py::test_importing_loads_neither_torch_nor_kernels'; "
        "print(*m.faults([m.Mutant('replay/checks/call_keys.py', 'tuple(map(_training, modules))', '()', test), "
        "m.Mutant('build.py', 'import sys\\n', 'import sys, torch\\n', inside)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("SURVIVES: ") == 1 == done.stdout.count("killed "), done.stdout + done.stderr
    assert "SURVIVES: replay/checks/call_keys.py: tuple(map(_training, modules)) -> ()" in done.stdout
