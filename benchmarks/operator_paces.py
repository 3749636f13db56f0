"""What share of a card's datasheet its operators reach: python -m benchmarks.operator_paces table

`monet_like.profile.gpu_paces` takes an operator's time to be ``launch + arithmetic * F / R + traffic * B / W``.
``collect`` writes the operators that a profile of a GPU timed alone, with what they do on any device; ``table`` fits
the factors of every kind to them, beside those that are in use, and prints how far times by the latter are from the
measured ones. The GPU need not be here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path

import click
import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize

from monet_like.capture.captured import Captured, distinct_tasks
from monet_like.capture.example_inputs import example_of
from monet_like.compiler.request import Request, captured_for
from monet_like.ir.defaults import MODE
from monet_like.ir.mode import ALGORITHMS
from monet_like.ir.profile_file import Profile
from monet_like.ir.schedule_file import InputSpec
from monet_like.models import build_model
from monet_like.profile.devices import DEVICES, DeviceLimits, known_limits
from monet_like.profile.gpu_paces import PACES, Pace
from monet_like.profile.roofline import operation_seconds
from monet_like.profile.work import Operation, works_of

from .rows import markdown_table

HERE = Path(__file__).parent / "results" / "cuda-nvidia-h200" / "operators.csv"
#: With fewer operators than this, factors are not fitted.
FEWEST = 4


@dataclass(frozen=True)
class Timed:
    """An operator of a net that was timed alone."""

    net: str
    operation: Operation
    seconds: float


def timed_alone(captured: Captured, profile: Profile, net: str) -> Iterator[Timed]:
    """Operators that are a task of their own, and were measured."""
    works = works_of(captured)
    refused = {task.cost for task in captured.every_task() if task.word == ALGORITHMS}
    for key in distinct_tasks(captured):
        cost, operations = profile.costs.get(key), works[key].operations
        if cost and isfinite(cost.seconds) and len(operations) == 1 and key not in refused:
            yield Timed(net, operations[0], cost.seconds)


def to_frame(timed: Sequence[Timed]) -> pd.DataFrame:
    """A row for each, the same ones once."""
    rows = [{"net": one.net, **asdict(one.operation), "seconds": one.seconds} for one in timed]
    return pd.DataFrame(rows).drop_duplicates().reset_index(drop=True)


def from_frame(frame: pd.DataFrame) -> list[Timed]:
    """What `to_frame` wrote."""
    names = [field.name for field in fields(Operation)]
    rows = frame.to_dict("records")
    return [Timed(row["net"], Operation(**{name: row[name] for name in names}), row["seconds"]) for row in rows]


def logs(timed: Sequence[Timed], pace: Pace, limits: DeviceLimits) -> np.ndarray:
    """Logarithms of measured times in those that ``pace`` gives."""
    given = [operation_seconds(one.operation, limits, pace) for one in timed]
    return np.log([one.seconds for one in timed]) - np.log(given)


def fitted(timed: Sequence[Timed], start: Pace, limits: DeviceLimits) -> Pace:
    """Traffic, arithmetic and launch that fit best: mean absolute error of logarithms, the longer operators heavier."""
    weights = np.sqrt([one.seconds for one in timed])
    multiplies = any(one.operation.flops + one.operation.convolution_flops for one in timed)

    def pace(found: np.ndarray) -> Pace:
        traffic, launch, arithmetic = (float(number) for number in np.exp(found))
        return replace(start, traffic=traffic, launch_seconds=launch, arithmetic=arithmetic if multiplies else 1.0)

    def error(found: np.ndarray) -> float:
        return float(np.average(np.abs(logs(timed, pace(found), limits)), weights=weights))

    first = np.log([start.traffic, start.launch_seconds, start.arithmetic])
    return pace(minimize(error, first, method="Nelder-Mead", options={"maxiter": 4000}).x)


def table(timed: Sequence[Timed], limits: DeviceLimits) -> pd.DataFrame:
    """A row for every kind, that with the longest operators first."""
    rows = []
    for kind, pace in PACES.items():
        found = [one for one in timed if one.operation.kind == kind]
        if not found:
            continue
        errors = logs(found, pace, limits)
        best = fitted(found, pace, limits) if len(found) >= FEWEST else None
        total = sum(one.seconds for one in found)
        rows.append(
            {
                "kind": kind,
                "operators": len(found),
                "measured ms": f"{1e3 * total:.2f}",
                "of predicted": f"{total / sum(operation_seconds(one.operation, limits) for one in found):.2f}",
                "a tenth below": f"{np.exp(np.quantile(errors, 0.1)):.2f}",
                "a tenth above": f"{np.exp(np.quantile(errors, 0.9)):.2f}",
                "traffic": f"{pace.traffic:g}",
                "arithmetic": f"{pace.arithmetic:g}",
                "launch us": f"{1e6 * pace.launch_seconds:g}",
                "fitted": _words(best) if best else "",
                "seconds": total,
            }
        )
    return pd.DataFrame(rows).sort_values("seconds", ascending=False).drop(columns="seconds")


def _words(pace: Pace) -> str:
    return f"{pace.traffic:.2f}, {pace.arithmetic:.2f}, {1e6 * pace.launch_seconds:.0f}"


def captured_on(limits: DeviceLimits, model: str, spec: InputSpec, autocast: str, mode: str) -> Captured:
    """A model's step as captured on a card that is not here."""
    example = example_of((spec,), torch.device("cpu"))
    with torch.device("meta"):
        module = build_model(model).module
    target = torch.device("cuda", 0)
    request = Request(module, example, mode, autocast=autocast, target=target, capability=limits.capability)
    return captured_for(request, example)


@click.group()
def main() -> None:
    """Operators of a GPU against its datasheet."""


@main.command()
@click.argument("profile_file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--model", required=True, help="That the profile is of, such as torchvision.models.resnet50().")
@click.option("--inputs", required=True, help="Dtype and shape with the batch, such as float32[184,3,224,224].")
@click.option("--autocast", default="")
@click.option("--mode", default=MODE, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=HERE, show_default=True)
def collect(profile_file: Path, model: str, inputs: str, autocast: str, mode: str, out: Path) -> None:
    """Add a profile's operators to a table of them."""
    profile = Profile.load(profile_file)
    limits = known_limits(profile.device.removeprefix("cuda: "))
    if limits is None:
        raise click.ClickException(f"there is no datasheet for {profile.device}")
    read = re.fullmatch(r"(\w+)\[(\d+(?:,\d+)*)\]", inputs.replace(" ", ""))
    if read is None:
        raise click.ClickException(f"--inputs {inputs!r} is no dtype and shape; give it as float32[184,3,224,224]")
    captured = captured_on(limits, model, InputSpec(tuple(map(int, read[2].split(","))), read[1]), autocast, mode)
    net = re.sub(r"\(.*", "", model).rpartition(".")[2]
    added = to_frame(list(timed_alone(captured, profile, net)))
    earlier = [pd.read_csv(out)] if out.exists() else []
    kept = [frame[frame.net != net] for frame in earlier]
    pd.concat([*kept, added]).to_csv(out, index=False, float_format="%.4g", lineterminator="\n")
    print(f"{len(added)} operators of {net}: {out}")


@main.command(name="table")
@click.option("--operators", type=click.Path(path_type=Path, exists=True), default=HERE, show_default=True)
@click.option("--device", type=click.Choice(sorted(DEVICES)), default="h200", show_default=True)
def print_table(operators: Path, device: str) -> None:
    """Print factors in use, factors that fit, and errors, by kind of operator."""
    timed = from_frame(pd.read_csv(operators))
    print(f"{len(timed)} operators; rates of {DEVICES[device].source}\n")
    found = table(timed, DEVICES[device])
    print(markdown_table(list(found.columns), found.itertuples(index=False)))


if __name__ == "__main__":
    main()
