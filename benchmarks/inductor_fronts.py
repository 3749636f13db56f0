"""Fronts of peak memory over work under Inductor: python -m benchmarks.inductor_fronts [--nets llama8,gpt2]

For every net: ``torch.compile``, ``torch.compile`` under ``activation_memory_budget`` with each of its solvers, and our
plans of Inductor's joint graph (`monet_like.compile_options`) at the measured peaks of these, and at the least that is
known.

* *Peak*: measured, a whole step with parameters, inputs and gradients. It is that of Inductor's own code, with its
  fusion, of which only the insides of the C++ kernels are left out (`benchmarks.unrun_kernels`): bytes are exact, and
  nothing is compiled.
* *Arithmetic*: floating-point operations of products, convolutions and attention in forward and backward, counted in
  the graphs that Inductor compiles, in units of ``torch.compile``'s.
* *Priced*: the step by one list of prices for all contenders, in units of ``torch.compile``'s: what each distinct call
  of PyTorch's operators took when it was timed alone, at best, and the bytes of the buffers that Inductor's kernels are
  given over the memory's rate. No step is timed.

Rows are kept in ``benchmarks/results/inductor_fronts.csv`` as they come, prices in ``inductor_fronts_prices.json``. A
second call goes on where the first one ended; rows that are there are not measured again. Settings that Inductor
compiles to the same graphs are measured once.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import Progress
from torch import fx, nn

from benchmarks.inductor_fronts_nets import DEFAULT, NETS
from benchmarks.inductor_fronts_table import ABOVE, COMPILE, OWN, Row, markdown
from benchmarks.kept_prices import kept_prices
from benchmarks.processes import ROOT
from benchmarks.rows import merged, read_rows, write_rows
from benchmarks.unrun_kernels import Calls, unrun_kernels
from monet_like.capture.example_inputs import Example
from monet_like.errors import MonetError
from monet_like.files import write_atomically
from monet_like.inductor.handed import Handed
from monet_like.inductor.joint import tensors_of
from monet_like.inductor.options import compile_options
from monet_like.inductor.partitioner import PlannedPartitioner
from monet_like.inductor.portfolio import is_called, writes_of
from monet_like.inductor.prices import device_of, measured_cost, operations_of
from monet_like.ir.schedule import Schedule
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import smallest_known
from monet_like.plan.result import Plan
from monet_like.profile.devices import device_name
from monet_like.replay.verify.steps import step_peak, train_step

CPU = torch.device("cpu")
#: The local search ends after so many seconds once it has a plan that fits.
SEARCH_SECONDS = 15.0
#: Policies that each annealing judges while the least peak is looked for, and how much above it ``least`` is planned.
LEAST_EVALUATIONS, ABOVE_LEAST = 4000, 1.01


class SameGraphsError(Exception):
    """A setting leads to graphs that were measured before.

    Attributes:
        before: the row of that setting.
    """

    def __init__(self, before: Row) -> None:
        super().__init__(f"the same graphs as {before.label}")
        self.before = before


class Planner(PlannedPartitioner):
    """Plans as `compile_options` does, and may be asked for the least that is known.

    Attributes:
        net: knows the schedules that were measured.
        least: plan for the least peak that is known, instead of for a budget.
        start: option of the local search: the schedule with that peak.
    """

    def __init__(self, other: PlannedPartitioner, net: Net, least: bool) -> None:
        super().__init__(other.settings, other.planned)
        self.net, self.least = net, least
        self.start: dict[str, Schedule] = {}

    def _plan_calls(self, handed: Handed, budget: int) -> tuple[Plan, int]:
        if self.least:
            known = smallest_known(Instance(handed.program, handed.costs), evaluations=LEAST_EVALUATIONS)
            assert known is not None
            budget, self.start = int(known.report.peak_bytes * ABOVE_LEAST), {"start": known.schedule}
        found = self._plan(handed, budget, **self.start)
        self.net.check_new(_decisions(found.schedule))
        return found, budget


@dataclass
class Net:
    """A net that is measured.

    Attributes:
        seconds: for the integer program; 0: plan by the local search alone.
        work, operators_seconds: of the graphs that were compiled last: floating-point operations, and the time of
            operators that Inductor does not generate.
        now: the row that is measured.
        measured: the first row of all graphs that were measured, by their hash.
    """

    name: str
    seconds: float
    model: nn.Module = field(init=False, repr=False)
    example: Example = field(init=False, repr=False)
    work: int = 0
    operators_seconds: float = 0.0
    now: Row | None = None
    measured: dict[str, Row] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.example = NETS[self.name].make().train(), NETS[self.name].inputs()

    def check_new(self, graphs: str) -> None:
        """Remember the graphs of the setting that is measured now.

        Raises:
            SameGraphsError: they were measured before.
        """
        key = hashlib.sha256(graphs.encode()).hexdigest()
        if self.now is None:
            return
        before = self.measured.setdefault(key, self.now)
        if before.key != self.now.key:
            raise SameGraphsError(before)

    def compiled(self, settings: Mapping[str, Any], options: Mapping[str, Any]) -> nn.Module:
        """A copy under ``torch.compile``, after a first step.

        Args:
            settings: of ``torch._functorch.config``.
            options: of Inductor.
        """
        self.work, self.operators_seconds = 0, 0.0
        torch._dynamo.reset()
        made: Any = torch.compile(
            copy.deepcopy(self.model), backend=partial(_backend, self, settings, options), dynamic=False
        )
        train_step(made, self.example)
        return made

    def planned(self, budget: int) -> tuple[nn.Module, PlannedPartitioner]:
        """A copy under our plan, and its partitioner; a budget of 0 is for the least that is known."""
        options = compile_options(
            max(1, budget), quick=not self.seconds, time_limit_seconds=self.seconds or SEARCH_SECONDS
        )
        planner = Planner(options["custom_partitioner_fn"], self, least=not budget)
        return self.compiled({}, {**options, "custom_partitioner_fn": planner}), planner

    def budgeted(self, setting: str) -> nn.Module:
        """A copy under an ``activation_memory_budget``, such as ``0.5 dp``."""
        share, solver = setting.split()
        name = "activation_memory_budget"
        return self.compiled({name: float(share), f"{name}_solver": solver}, {})


def _backend(
    net: Net, settings: Mapping[str, Any], options: Mapping[str, Any], graph: fx.GraphModule, inputs: Any
) -> Any:
    """Inductor as a backend of ``torch.compile``: counts the arithmetic of what it compiles."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def counted(part: fx.GraphModule, given: Any, **kwargs: Any) -> Any:
        if settings and not kwargs.get("is_backward"):  # what the forward saves decides the backward
            net.check_new(_written_out(part))
        for node in part.graph.nodes:
            if is_called(node):
                net.work += sum(done.flops + done.convolution_flops for done in operations_of(node))
                cost = measured_cost(node, writes_of(node), device_of(CPU, True))
                net.operators_seconds += cost.seconds if cost else 0.0
        return compile_fx_inner(part, given, **kwargs)

    with config.patch(dict(settings)):
        return compile_fx(graph, inputs, inner_compile=counted, config_patches=dict(options))


def _counted(net: Net, module: nn.Module, calls: Calls) -> dict[str, Any]:
    """The peak of a step, its arithmetic, and its price."""
    calls.count = calls.bytes = 0
    peak = step_peak(module, net.example, CPU)
    limits = device_of(CPU, True).limits
    moving = calls.count * limits.launch_seconds + calls.bytes / limits.bytes_per_second
    return {"peak_bytes": peak, "operations": net.work, "priced_seconds": net.operators_seconds + moving}


def _decisions(schedule: Schedule) -> str:
    """All that a schedule decides; its ``repr`` is a summary, which other schedules share."""
    return str(astuple(schedule))


def _written_out(graph: fx.GraphModule) -> str:
    """All of a graph that its code depends on."""
    shapes = [f"{t.dtype}{tuple(t.shape)}" for n in graph.graph.nodes for t in tensors_of(n.meta.get("val"))]
    return f"{graph.graph} {shapes}"


@dataclass
class Rows:
    """The rows of a folder, which are written as they come.

    Attributes:
        rows: of all nets.
        tell: called with a line for people.
    """

    path: Path
    rows: list[Row]
    tell: Callable[[str], None]

    def known(self, row: Row) -> Row | None:
        """The row of the same key, if it need not be measured again."""
        return next((r for r in self.rows if r.key == row.key and r.status in ("measured", "refused")), None)

    def keep(self, row: Row) -> None:
        """Put it in the place of the row of its key."""
        self.rows[:] = merged(self.rows, [row])
        write_rows(self.path, self.rows)

    def measure(self, net: Net, row: Row, figures: Callable[[], dict[str, Any]]) -> Row:
        """The row of a setting, from the file or measured now; a failure is a row, too."""
        if (known := self.known(row)) is not None:
            return known
        started = time.monotonic()
        net.now = row
        try:
            done = replace(row, status="measured", **figures())
        except Exception as error:  # of any contender: the table says what it was
            cause = getattr(error, "inner_exception", error)
            before = self.known(cause.before) if isinstance(cause, SameGraphsError) else None
            net.measured = {graphs: other for graphs, other in net.measured.items() if other.key != row.key}
            if before is not None:
                done = replace(before, setting=row.setting, budget_bytes=row.budget_bytes or before.budget_bytes)
            else:
                words = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
                done = replace(row, status="refused" if isinstance(cause, MonetError) else "failed", reason=words[:300])
        self.tell(f"{time.strftime('%H:%M:%S')} {done.told} in {time.monotonic() - started:.0f} s")
        self.keep(done)
        return done


def measure_net(
    net: Net, calls: Calls, budgets: Sequence[str], shares: Sequence[float], rows: Rows, done: Callable[[int], None]
) -> None:
    """Measure peaks and count the work of all contenders.

    Args:
        calls: of the kernels that are left out.
        budgets: settings of ``activation_memory_budget``.
        shares: of ``torch.compile``'s peak.
        done: called with how many rows are there.
    """

    def measured(row: Row, make: Callable[[], nn.Module]) -> Row:
        found = rows.measure(net, row, lambda: _counted(net, make(), calls))
        done(1)
        return found

    def planned(setting: str, budget: int) -> None:
        def figures() -> dict[str, Any]:
            module, planner = net.planned(budget)
            (graph,) = planner.graphs
            found = {"budget_bytes": graph.budget_bytes, "predicted_bytes": graph.peak_bytes}
            return {**_counted(net, module, calls), **found}

        rows.measure(net, Row(net.name, OWN, setting, budget_bytes=budget), figures)
        done(1)

    plain = measured(Row(net.name, COMPILE), lambda: net.compiled({}, {}))
    if plain.status != "measured":
        return
    planned("least", 0)
    targets = {f"{100 * share:g}%": int(share * plain.peak_bytes) for share in shares}
    for setting in budgets:
        found = measured(Row(net.name, ABOVE, setting), partial(net.budgeted, setting))
        if found.status == "measured" and found.peak_bytes not in targets.values():
            targets[f"at {setting}"] = found.peak_bytes
            planned(f"at {setting}", found.peak_bytes)
        else:
            done(1)
    for setting, target in targets.items():
        if not setting.startswith("at "):
            planned(setting, target)


@click.command()
@click.option("--nets", default=",".join(DEFAULT), help=f"Of {', '.join(NETS)}.  [default: {', '.join(DEFAULT)}]")
@click.option(
    "--budgets", default="0.5,0.05,0.3,0.15,0.7", show_default=True, help="Values of activation_memory_budget."
)
@click.option("--solvers", default="dp,ilp,greedy", show_default=True, help="Of activation_memory_budget.")
@click.option("--shares", default="", help="Percent of torch.compile's peak to plan for besides.")
@click.option("--seconds", default=0.0, show_default=True, help="For the integer program; 0: the local search alone.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of rows and table.  [default: benchmarks/results]")
def main(nets: str, budgets: str, solvers: str, shares: str, seconds: float, out: Path | None) -> None:
    """Measure, and write the table."""
    folder = out or ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "inductor_fronts.csv"
    settings = [f"{share} {solver}" for solver in solvers.split(",") for share in budgets.split(",")]
    percents = [float(text) / 100 for text in shares.split(",") if text]
    names = nets.split(",")
    console = Console(stderr=True)
    rows = Rows(path, read_rows(path, Row), console.print)
    with kept_prices(folder / "inductor_fronts_prices.json", CPU) as save, Progress(console=console) as bar:
        task = bar.add_task("rows", total=len(names) * (2 + 2 * len(settings) + len(percents)))
        for name in names:
            bar.update(task, description=name)

            def done(count: int) -> None:
                bar.advance(task, count)
                save()

            with unrun_kernels() as calls:
                net = Net(name, seconds)
                measure_net(net, calls, settings, percents, rows, done)
            text = markdown(rows.rows, {net: found.what for net, found in NETS.items()}, device_name(CPU))
            write_atomically(folder / "inductor_fronts.md", text.encode())


if __name__ == "__main__":
    main()
