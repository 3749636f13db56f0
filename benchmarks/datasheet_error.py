"""How far estimates from a datasheet are from times on the card.

python -m benchmarks.datasheet_error PROFILE --model MODEL --inputs INPUTS

Reads a profile that was measured on a GPU, which need not be here, prices plain PyTorch's step by the datasheet of the
same card, and prints both by kind of operator. Sums over the operators of one step; profiles of `scripts/gpu_check.sh`
do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from benchmarks.rows import markdown_table
from monet_like.capture.captured import Captured
from monet_like.capture.example_inputs import example_of
from monet_like.compiler.request import Request, captured_for
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import Cost, Task
from monet_like.ir.schedule_file import InputSpec
from monet_like.models import build_model
from monet_like.profile.devices import DeviceLimits, known_limits
from monet_like.profile.roofline import roofline

#: What names a task of several calls, and is told apart further.
_CONVOLUTIONS = ("convolution", "convolution_backward")

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Row:
    """Operators of one kind in a step: how many, and their seconds on the card and by a roofline profile."""

    kind: str
    count: int
    measured: float
    predicted: float


def kind_of(task: Task) -> str:
    """The operator that a task is named by; of convolutions also whether they are 1x1 or depthwise."""
    names = [call.op.split(".")[1] for call in task.calls]
    name = next((name for name in names if name in _CONVOLUTIONS), names[-1])
    if name in _CONVOLUTIONS:
        shapes = [tuple(map(int, shape.split(", "))) for shape in re.findall(r"\[(\d+(?:, \d+){3,4})\]", task.cost)]
        if any(set(shape[2:]) == {1} for shape in shapes):
            return f"{name}, 1x1"
        if any(shape[1] == 1 and shape[0] > 1 and max(shape[2:]) < 8 for shape in shapes):
            return f"{name}, depthwise"
    return name


def rows(tasks: Iterable[Task], measured: Mapping[str, Cost], predicted: Mapping[str, Cost]) -> list[Row]:
    """Sums by kind, the longest first; tasks that the profile lacks are left out."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for task in tasks:
        if task.cost in measured and task.cost in predicted:
            found = sums[kind_of(task)]
            found[0] += 1
            found[1] += measured[task.cost].seconds
            found[2] += predicted[task.cost].seconds
    return sorted((Row(kind, int(n), m, p) for kind, (n, m, p) in sums.items()), key=lambda row: -row.measured)


def together(kind: str, added: Sequence[Row]) -> Row:
    """The sum of some rows."""
    return Row(kind, *(sum(getattr(row, name) for row in added) for name in ("count", "measured", "predicted")))


def captured_from(profile: Profile, model: str, inputs: str, autocast: str, mode: str) -> tuple[Captured, DeviceLimits]:
    """The program that a profile of a GPU is of, captured without that GPU, and the card's datasheet."""
    limits = known_limits(profile.device.removeprefix("cuda: "))
    if limits is None:
        raise click.ClickException(f"there is no datasheet for {profile.device}")
    read = re.fullmatch(r"(\w+)\[(\d+(?:,\d+)*)\]", inputs.replace(" ", ""))
    if read is None:
        raise click.ClickException(f"--inputs {inputs!r} is no dtype and shape; give it as float32[184,3,224,224]")
    spec = InputSpec(tuple(map(int, read[2].split(","))), read[1])
    return captured_on(limits, model, spec, autocast, mode), limits


def captured_on(limits: DeviceLimits, model: str, spec: InputSpec, autocast: str, mode: str) -> Captured:
    """A model's step as captured on a card that is not here."""
    example = example_of((spec,), torch.device("cpu"))
    with torch.device("meta"):
        module = build_model(model).module
    target = torch.device("cuda", 0)
    request = Request(module, example, mode, autocast=autocast, target=target, capability=limits.capability)
    return captured_for(request, example)


def profile_options(mode: str) -> Callable[[_Command], _Command]:
    """Decorate a command with the arguments of `captured_from`; ``mode`` is the default of one of them."""
    options = (
        click.argument("profile_file", type=click.Path(path_type=Path, exists=True, dir_okay=False)),
        click.option("--model", required=True, help="That the profile is of, such as torchvision.models.resnet50()."),
        click.option("--inputs", required=True, help="Dtype and shape with the batch, such as float32[184,3,224,224]."),
        click.option("--autocast", default=""),
        click.option("--mode", default=mode, show_default=True),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command()
@profile_options("normal")
@click.option("--most", default=12, show_default=True, help="Rows; the others are summed up.")
def main(profile_file: Path, model: str, inputs: str, autocast: str, mode: str, most: int) -> None:
    """Print measured and estimated times by kind of operator."""
    profile = Profile.load(profile_file)
    captured, limits = captured_from(profile, model, inputs, autocast, mode)
    plain = (*captured.plain.tasks, *(slot[0] for slot in captured.plain.slots))
    found = rows((task for task in plain if task.runs != "again"), profile.costs, roofline(captured, limits))
    shown = [*found[:most], *([together("others", found[most:])] if found[most:] else []), together("all", found)]
    print(f"{model}, {inputs}{f', {autocast}' if autocast else ''}; {profile.device}\n")
    cells = []
    for row in shown:
        ratio = f"{row.measured / row.predicted:.2f}" if row.predicted else ""
        cells.append((row.kind, row.count, f"{1e3 * row.measured:.2f} ms", f"{1e3 * row.predicted:.2f} ms", ratio))
    print(markdown_table(("operator", "in a step", "measured", "predicted", "ratio"), cells))


if __name__ == "__main__":
    main()
