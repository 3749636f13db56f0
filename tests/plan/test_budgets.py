"""Questions about budgets: the smallest, the front, the largest batch; against brute force and as commands."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from planning import ROOT, network, peak
from random_programs import best_seconds, random_program

from monet_like.cli.group import main
from monet_like.plan.budgets import MOST_SIZE, largest_size, pareto, seconds_per_gigabyte, smallest_budget

CHAIN = f"{ROOT / 'tests' / 'helpers' / 'chain.py'}:chain"
QUICK = ["--profile", "roofline:a100", "--time-limit", "3"]


def test_smallest_budget_is_the_lowest_peak_of_all_schedules() -> None:
    for seed in range(5):
        program, costs = random_program(random.Random(seed), 4)
        found = smallest_budget(program, costs, time_limit_seconds=20)
        lowest = found.report.peak_bytes
        assert best_seconds(program, costs, lowest) is not None, seed
        assert found.proven_bytes <= lowest
        assert best_seconds(program, costs, lowest - 1) is None, seed


def test_pareto_front_has_the_fastest_plan_at_every_budget() -> None:
    program, costs = random_program(random.Random(5), 4)
    budgets = [program.resident_bytes + extra for extra in (4, 8, 12, 16, 20, 30)]
    points = pareto(program, costs, budgets, time_limit_seconds=20, gap=0.0)
    assert [point.budget_bytes for point in points] == budgets
    for point in points:
        best = best_seconds(program, costs, point.budget_bytes)
        assert (point.plan is None) == (best is None)
        assert point.plan is None or point.plan.report.seconds == pytest.approx(best)


@pytest.mark.slow
def test_seconds_saved_per_gigabyte() -> None:
    program, costs = network(20)
    top = peak(program, costs)
    points = pareto(program, costs, [top // 2, top], time_limit_seconds=10)
    one, other = (point.plan for point in points)
    assert one is not None
    assert other is not None
    expected = (one.report.seconds - other.report.seconds) / ((top - top // 2) / 2**30)
    assert seconds_per_gigabyte(points) == (pytest.approx(expected), None)
    assert expected > 0


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_pareto_command(tmp_path: Path) -> None:
    table, picture = tmp_path / "front.csv", tmp_path / "front.png"
    text = run("pareto", CHAIN, "16", *QUICK, "--points", "3", "--csv", str(table), "--plot", str(picture))
    assert "10 % more memory saves" in text and "predicted step" in text
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 3
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds, reverse=True)
    assert all(int(row["peak_bytes"]) <= int(row["budget_bytes"]) for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_command(tmp_path: Path) -> None:
    table = tmp_path / "all.csv"
    text = run(
        "compare", CHAIN, "16", "90%,75%", *QUICK, "--strategies", "heuristic,ogc,store_all", "--csv", str(table)
    )
    rows = {(row["strategy"], row["budget_bytes"]): row for row in csv.DictReader(table.open())}
    assert len(rows) == 6
    assert all(row["seconds"] for (name, _), row in rows.items() if name == "heuristic")
    assert not any(row["seconds"] for (name, _), row in rows.items() if name == "store_all")
    assert "store_all" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", CHAIN, "16", "abc%"), "no percentage"),
        (("compare", CHAIN, "16", "50%", "--strategies", "best"), "unknown strategy"),
        (("pareto", CHAIN, "16", "--points", "1"), "at least 2"),
        (("largest-batch", CHAIN, "abc"), "not an amount of memory"),
    ],
)
def test_wrong_arguments_of_commands_are_refused(arguments: tuple[str, ...], words: str) -> None:
    extra = ("--profile", "roofline:a100") if arguments[0] == "compare" else ()
    result = CliRunner().invoke(main, [*arguments, *extra])
    assert result.exit_code == 2
    assert words in result.stderr


def test_the_largest_size() -> None:
    for most in (0, 1, 2, 7, 8, 100):
        for begin in (1, 4, 9):
            assert largest_size(lambda n, most=most: n <= most, begin) == most  # type: ignore[misc]
        power = largest_size(lambda n, most=most: n <= most, powers=True)  # type: ignore[misc]
        assert power <= most < 2 * power or most == power == 0
    assert largest_size(lambda n: True, powers=True) == MOST_SIZE
