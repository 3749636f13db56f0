"""The fronts under Inductor: peaks without kernels are those with them, and a command goes on where it ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from benchmarks import inductor_fronts
from benchmarks.inductor_fronts_nets import Measured
from benchmarks.inductor_fronts_table import ABOVE, COMPILE, OWN, Row
from benchmarks.kept_prices import kept_prices
from benchmarks.rows import read_rows
from benchmarks.unrun_kernels import unrun_kernels
from monet_like.errors import UsageError
from monet_like.inductor import prices
from monet_like.ir.program import Cost
from monet_like.ir.schedule import Schedule
from monet_like.replay.verify.steps import step_peak, train_step

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(2))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def row(contender: str, setting: str, peak: int, priced: float, **more: int) -> Row:
    made = Row("net", contender, setting, "measured", peak_bytes=peak, priced_seconds=priced, operations=100)
    return replace(made, **{"budget_bytes": peak, "predicted_bytes": peak, **more} if contender == OWN else more)


def test_schedules_of_the_same_counts_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Schedule((0, 1, 2), ((1,), again), (0, 0)) for again in ((2,), (0,)))
    assert repr(one) == repr(other)
    monkeypatch.setattr(inductor_fronts, "NETS", {"net": Measured(Net, lambda: ((torch.randn(2, 32),), {}), "")})
    net = inductor_fronts.Net("net", 0.0)
    for setting, schedule in (("70%", one), ("60%", other)):
        net.now = row(OWN, setting, 1, 1.0)
        net.check_new(inductor_fronts._decisions(schedule))
    with pytest.raises(inductor_fronts.SameGraphsError, match=r"the same graphs as planned 70%"):
        net.check_new(inductor_fronts._decisions(replace(one)))


@pytest.mark.slow
def test_peaks_without_kernels_are_those_with_them() -> None:
    torch.manual_seed(0)
    model, example = Net(), ((torch.randn(256, 32),), {})
    found = []
    for left_out in (True, False):
        torch._dynamo.reset()
        function = torch.compile(model, dynamic=False)
        if left_out:
            with unrun_kernels() as calls:
                train_step(function, example)
            assert calls.count and calls.bytes
        else:
            train_step(function, example)
        found.append(step_peak(function, example, CPU))
    assert found[0] == found[1]
    with_kernels = [parameter.grad for parameter in model.parameters()]
    train_step(model, example)
    assert all(torch.allclose(a, b.grad) for a, b in zip(with_kernels, model.parameters(), strict=True))


@pytest.mark.slow
def test_the_command_measures_writes_a_table_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets = {"net": Measured(Net, lambda: ((torch.randn(256, 32),), {}), "two layers")}
    monkeypatch.setattr(inductor_fronts, "NETS", nets)
    words = ["--nets", "net", "--budgets", "0.1,0.09", "--shares", "80", "--out", str(tmp_path)]
    done = CliRunner().invoke(inductor_fronts.main, [*words, "--solvers", "dp"])
    assert done.exit_code == 0, done.output
    rows = {r.label: r for r in read_rows(tmp_path / "inductor_fronts.csv", Row)}
    assert [r.reason for r in rows.values() if r.status != "measured"] == []
    others = {f"{ABOVE} 0.1 dp", f"{ABOVE} 0.09 dp"}
    planned = {f"{OWN} {setting}" for setting in ("least", "80%", "at 0.1 dp")}
    assert set(rows) == {COMPILE, *others, *planned}
    own = [r for r in rows.values() if r.contender == OWN]
    assert [r for r in own if not 0.97 * r.predicted_bytes <= r.peak_bytes <= r.budget_bytes + 64] == []
    first, second = (replace(rows[label], setting="") for label in sorted(others))
    assert first == second  # the same graphs: measured once
    assert "| planned least |" in (tmp_path / "inductor_fronts.md").read_text()

    content = (tmp_path / "inductor_fronts_prices.json").read_text()
    monkeypatch.setattr(inductor_fronts.Net, "compiled", lambda *_: pytest.fail("measured again"))
    done = CliRunner().invoke(inductor_fronts.main, [*words, "--solvers", "dp"])
    assert done.exit_code == 0, done.output
    assert {r.label: r for r in read_rows(tmp_path / "inductor_fronts.csv", Row)} == rows
    assert (tmp_path / "inductor_fronts_prices.json").read_text() == content


def test_prices_are_kept_and_those_of_another_device_are_refused(tmp_path: Path) -> None:
    path, cost = tmp_path / "prices.json", Cost(1.5, 64)
    with kept_prices(path, CPU) as save:
        limits = prices.device_of(CPU, True).limits
        prices.MEASURED.update({"a call": cost, "one that does not run": None})
        save()
    assert "a call" not in prices.MEASURED
    with kept_prices(path, CPU):
        assert dict(prices.MEASURED) == {"a call": cost, "one that does not run": None}
        assert prices.device_of(CPU, True).limits == limits
    path.write_text(path.read_text().replace("cpu: ", "cpu: another "))
    with pytest.raises(UsageError, match=r"are of cpu: another .* give another folder"), kept_prices(path, CPU):
        pass
