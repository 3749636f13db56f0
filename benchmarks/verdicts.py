"""Verdicts of sweeps over many models: what judging raises, a line of JSON for each, a table of all, and
the exit code.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

#: What may become of a model, the good ones first.
RIGHT, ROUNDING, VALUES, REFUSED, INVALID, NO_GRADIENT, RANDOM, SLOW, WRONG, CRASHED = STATUSES = (
    "right", "rounding", "depends on values", "refused", "invalid in plain PyTorch", "no gradient",
    "differs from itself", "slow",
    "wrong", "crashed",
)  # fmt: skip
#: Those of which a table tells no reasons.
_PLAIN = (RIGHT, NO_GRADIENT)


@dataclass(frozen=True)
class Verdict:
    """What has become of a model: one of `STATUSES`, the reason, and the seconds that judging took."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0


def judged(name: str, judge: Callable[[], tuple[str, object]], most_seconds: int = 0) -> Verdict:
    """The verdict of a function that returns a status and the reason, whatever it raises.

    Args:
        most_seconds: after which the status is `SLOW`; 0: none is.
    """
    started = time.monotonic()
    try:
        with limited(most_seconds, TimeoutError(f"more than {most_seconds} s")), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status, detail = judge()
    except TimeoutError as error:
        status, detail = SLOW, error
    except Exception as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f" ({at.tb_frame.f_code.co_filename}:{at.tb_lineno})" if at is not None else ""
        status, detail = CRASHED, f"{type(error).__name__}: {error}{where}"
    return Verdict(name, status, str(detail)[:400], round(time.monotonic() - started, 2))


def refusal(error: Exception) -> tuple[str, Exception]:
    """Status and reason of a refused model: `VALUES`, if what it computes depends on the values of tensors."""
    of_values = re.search("values of a tensor|DynamicOutputShape|depends on their values", str(error))
    return VALUES if of_values else REFUSED, error


@contextlib.contextmanager
def limited(seconds: float, late: BaseException) -> Iterator[None]:
    """Raise ``late`` within if it takes more seconds; 0: it may take any."""

    def stop(*_: object) -> None:
        raise late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits; any two numbers that are none are the same."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        return same(one.to_dense(), other.to_dense())
    if one.is_complex():
        one, other = (torch.view_as_real(tensor.resolve_conj()) for tensor in (one, other))
    if one.is_floating_point():
        if not torch.equal(one.isnan(), other.isnan()):
            return False
        one, other = one.nan_to_num(), other.nan_to_num()
    return torch.equal(one, other)


def summary(found: list[Verdict], title: str) -> Table:
    """A table of verdicts, with their reasons; numbers and names in these are left out, so that the same ones are
    counted together.
    """
    table = Table(title=title)
    table.add_column("verdict")
    table.add_column("models", justify="right")
    count = Counter(verdict.status for verdict in found)
    for status in STATUSES:
        table.add_row(status, str(count[status]))
        reasons: dict[str, list[str]] = {}
        for verdict in found:
            if verdict.status == status and status not in _PLAIN:
                reasons.setdefault(re.sub(r"'[^']*'|\d+(\.\d+)?", "…", verdict.detail)[:160], []).append(verdict.name)
        for reason, names in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
            table.add_row(f"  {reason}: {', '.join(names[:6])}", str(len(names)), style="dim")
    return table


def report(verdicts: Iterable[Verdict], of: str, out: Path | None) -> None:
    """Write a line of JSON for each verdict as it comes, print the table, and exit with code 1 if one is wrong or
    crashed.

    Args:
        of: what was judged, for the title.
        out: a file for the lines.
    """
    found: list[Verdict] = []
    with out.open("w") if out else contextlib.nullcontext() as file:
        for verdict in verdicts:
            found.append(verdict)
            if file is not None:
                print(json.dumps(asdict(verdict)), file=file, flush=True)
    Console(width=160).print(summary(found, f"{len(found)} {of}"))
    if any(verdict.status in (WRONG, CRASHED) for verdict in found):
        sys.exit(1)


def _part_of(_context: click.Context, _option: click.Parameter, shard: str) -> tuple[int, int]:
    try:
        part, parts = map(int, shard.split("/"))
    except ValueError:
        raise click.BadParameter(f"{shard!r} must be a part and how many there are, such as 2/8") from None
    return part, parts


#: Options of the commands.
shard_option = click.option(
    "--shard", default="0/1", show_default=True, callback=_part_of, help="Which part of how many, such as 2/8."
)
out_option = click.option("--out", type=click.Path(path_type=Path), help="File for a line of JSON for each model.")
