"""Fronts of peak memory over work under Inductor: python -m benchmarks.inductor_fronts [--nets llama8,gpt2]

For every net: ``torch.compile``, ``torch.compile`` under ``activation_memory_budget`` with each of its solvers, and our plans of
Inductor's joint graph (`monet_like.compile_options`) at fixed shares of ``torch.compile``'s peak and at the measured peaks of the former.

* *Peak*: measured, a whole step with parameters, inputs and gradients. It is that of Inductor's own code, with its fusion, of which
  only the insides of the C++ kernels are left out (`benchmarks.unrun_kernels`): bytes are exact, and nothing is compiled.
* *Arithmetic*: floating-point operations of products, convolutions and attention in forward and backward, counted in the graphs
  that Inductor compiles, in units of ``torch.compile``'s.
* *Priced*: the step by one list of prices for all contenders, in units of ``torch.compile``'s: what each distinct call of PyTorch's
  operators took when it was timed alone, once, and the bytes of the buffers that Inductor's kernels are given over the memory's rate.
  No step is timed.

The nets ``llama`` have the structure of pytorch/pytorch#197838, a decoder with 32 layers, at sizes that a small machine can run.
Rows are kept in ``benchmarks/results/inductor_fronts.csv``; the table, and what holds, is made of them.
"""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import fx, nn

from benchmarks.inductor_fronts_table import ABOVE, COMPILE, OWN, Row, markdown
from benchmarks.processes import ROOT
from benchmarks.rows import merged, read_rows, write_rows
from benchmarks.unrun_kernels import Calls, unrun_kernels
from benchmarks.work import WORK, LanguageModel, images, tokens, volumes
from monet_like.capture.example_inputs import Example
from monet_like.errors import InfeasibleError, MonetError
from monet_like.files import write_atomically
from monet_like.inductor.joint import is_generated, is_view
from monet_like.inductor.options import compile_options
from monet_like.inductor.prices import device_of, flops_of, measured_cost
from monet_like.models.decoders import Decoder, Shape
from monet_like.profile.devices import device_name
from monet_like.replay.verify import step_peak, train_step

CPU = torch.device("cpu")


def llama(blocks: int) -> nn.Module:
    """A decoder with its loss, all layers alike."""
    return Decoder(Shape(width=64, blocks=blocks, heads=4, groups=4, hidden=176, vocabulary=256), length=128)


def _sentences(batch: int) -> Example:
    return tuple(torch.randint(0, 256, (batch, 128)) for _ in range(2)), {}


def _of_work(
    name: str, inputs: Callable[[], Example], what: str
) -> tuple[Callable[[], nn.Module], Callable[[], Example], str]:
    return WORK[name].cpu.make, inputs, what


#: The model, random inputs, and both in words.
NETS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Example], str]] = {
    "llama": (partial(llama, 32), partial(_sentences, 4), "32 layers of width 64, 4 x 128 tokens"),
    "llama8": (partial(llama, 8), partial(_sentences, 4), "8 layers of width 64, 4 x 128 tokens"),
    "gpt2": (
        partial(LanguageModel, 2, 64, 4, 512, 128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        partial(tokens(512, 128), 4),
        "2 layers of width 64, 4 x 128 tokens, no dropout",
    ),
    "vgg16": _of_work("vgg16", partial(images, 2, 32), "batch 2, 32 pixels"),
    "resnet50": _of_work("resnet50", partial(images, 4, 64), "batch 4, 64 pixels"),
    "googlenet": _of_work("googlenet", partial(images, 4, 64), "batch 4, 64 pixels"),
    "mobilenet_v2": _of_work("mobilenet_v2", partial(images, 4, 64), "batch 4, 64 pixels"),
    "unet": _of_work("unet", partial(images, 1, 64), "width 32, 64 pixels"),
    "nnunet": _of_work("nnunet", partial(volumes(16, 16, 16), 1), "4 levels from width 16, 16 x 16 x 16 voxels"),
    "densenet121": _of_work("densenet121", partial(images, 2, 64), "batch 2, 64 pixels"),
    "vit_b_16": _of_work("vit_b_16", partial(images, 4, 160), "as ViT-Ti/16, batch 4, 160 pixels"),
    "convnext_tiny": _of_work("convnext_tiny", partial(images, 2, 64), "batch 2, 64 pixels"),
}  # fmt: skip


@dataclass
class Net:
    """A net that is measured.

    Attributes:
        seconds: for the integer program; 0: plan by the local search alone.
        work, operators_seconds: of the graphs that were compiled last: floating-point operations, and the time of operators
            that Inductor does not generate.
    """

    name: str
    seconds: float
    model: nn.Module = field(init=False, repr=False)
    example: Example = field(init=False, repr=False)
    work: int = 0
    operators_seconds: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        make, inputs, _ = NETS[self.name]
        self.model, self.example = make().train(), inputs()

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

    def planned(self, budget: int | str) -> tuple[nn.Module, Any]:
        """A copy under our plan, and its partitioner."""
        options = compile_options(budget, quick=not self.seconds, time_limit_seconds=self.seconds or 1.0)
        return self.compiled({}, options), options["custom_partitioner_fn"]

    def budgeted(self, setting: str) -> nn.Module:
        """A copy under an ``activation_memory_budget``, such as ``0.5 dp``."""
        share, solver = setting.split()
        name = "activation_memory_budget"
        return self.compiled({name: float(share), f"{name}_solver": solver}, {})


def _is_called(node: fx.Node) -> bool:
    """Whether Inductor calls PyTorch's operator; a plan's own operators are none of them, and become no calls."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "monet_like_inductor":
        return False
    return not is_generated(node) and not is_view(node)


def _backend(
    net: Net, settings: Mapping[str, Any], options: Mapping[str, Any], graph: fx.GraphModule, inputs: Any
) -> Any:
    """Inductor as a backend of ``torch.compile``: counts the arithmetic of what it compiles."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def counted(part: fx.GraphModule, given: Any, **kwargs: Any) -> Any:
        for node in part.graph.nodes:
            if _is_called(node):
                net.work += sum(flops_of(node))
                parts = tuple(user for user in node.users if user.target is operator.getitem)
                cost = measured_cost(node, parts or (node,), device_of(CPU, True))
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


def peaks(net: Net, calls: Calls, budgets: Sequence[str], shares: Sequence[float], keep: Callable[[Row], None]) -> None:
    """Measure peaks and count the work of all contenders, and hand every row to ``keep``.

    Args:
        calls: of the kernels that are left out.
    """
    plain = Row(net.name, COMPILE)
    with _row(plain, keep) as add:
        plain = add(**_counted(net, net.compiled({}, {}), calls))
    if plain.status != "measured":
        return
    targets = {f"{100 * share:g}%": int(share * plain.peak_bytes) for share in shares}
    for setting in budgets:
        with _row(Row(net.name, ABOVE, setting), keep) as add:
            found = add(**_counted(net, net.budgeted(setting), calls))
            if found.peak_bytes not in targets.values():
                targets[f"at {setting}"] = found.peak_bytes
    with _row(Row(net.name, OWN, "least"), keep) as add:
        _planned(net, calls, add, _smallest(net))
    for setting, target in targets.items():
        with _row(Row(net.name, OWN, setting, budget_bytes=target), keep) as add:
            _planned(net, calls, add, target)


def _planned(net: Net, calls: Calls, add: Callable[..., Row], budget: int) -> None:
    module, partitioner = net.planned(budget)
    (graph,) = partitioner.graphs
    add(**_counted(net, module, calls), budget_bytes=budget, predicted_bytes=graph.peak_bytes)


def _smallest(net: Net) -> int:
    """The smallest budget for which a plan is known."""
    try:
        net.planned(1)
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, InfeasibleError) and cause.smallest_bytes is not None:
            return cause.smallest_bytes
        raise
    raise AssertionError("a plan for one byte")


def _cause(error: BaseException) -> BaseException:
    """What a backend of ``torch.compile`` has raised."""
    return getattr(error, "inner_exception", error)


@contextmanager
def _row(row: Row, keep: Callable[[Row], None]) -> Iterator[Callable[..., Row]]:
    """Keeps a row with what is added to it, or with the reason why nothing could be measured."""
    started, done = time.monotonic(), row

    def add(**found: Any) -> Row:
        nonlocal done
        done = replace(done, status="measured", **found)
        return done

    try:
        yield add
    except Exception as error:  # of any contender: the table says what it was
        cause = _cause(error)
        words = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        done = replace(row, status="refused" if isinstance(cause, MonetError) else "failed", reason=words[:300])
    click.echo(f"{time.strftime('%H:%M:%S')} {done.told} in {time.monotonic() - started:.0f} s", err=True)
    keep(done)


@click.command()
@click.option("--nets", default=",".join(NETS), help=f"Of {', '.join(NETS)}.  [default: all]")
@click.option(
    "--budgets", default="0.7,0.5,0.3,0.1,0.05", show_default=True, help="Values of activation_memory_budget."
)
@click.option("--solvers", default="dp,ilp,greedy", show_default=True, help="Of activation_memory_budget.")
@click.option("--shares", default="90,80,70,60", show_default=True, help="Percent of torch.compile's peak.")
@click.option("--seconds", default=0.0, show_default=True, help="For the integer program; 0: the local search alone.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of rows and table.  [default: benchmarks/results]")
def main(nets: str, budgets: str, solvers: str, shares: str, seconds: float, out: Path | None) -> None:
    """Measure, and write the table."""
    folder = out or ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_rows(folder / "inductor_fronts.csv", Row)

    def keep(row: Row) -> None:
        rows[:] = merged(rows, [row])
        write_rows(folder / "inductor_fronts.csv", rows)

    settings = [f"{share} {solver}" for solver in solvers.split(",") for share in budgets.split(",")]
    percents = [float(text) / 100 for text in shares.split(",")]
    for name in nets.split(","):
        net = Net(name, seconds)
        with unrun_kernels() as calls:
            peaks(net, calls, settings, percents, keep)
        text = markdown(rows, {net: what for net, (_, _, what) in NETS.items()}, device_name(CPU))
        write_atomically(folder / "inductor_fronts.md", text.encode())


if __name__ == "__main__":
    main()
