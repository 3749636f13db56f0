"""Schedule and profile files that are damaged in every way: ``python -m benchmarks.mutations --count 10000``.

Each mutation changes the bytes, the structure or the numbers of a valid file. Whatever it says, the outcome is one of
two: an error of this package's family, or a training step that equals plain PyTorch's to the bit. Everything else is a
fault, and the command fails: another exception, another gradient, more than `LIMIT_SECONDS`, memory beyond
`MOST_BYTES`, code that was run. A mutation is known by its number: ``--first 4711 --count 1`` makes it again.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from benchmarks.resident_memory import status_bytes
from benchmarks.verdicts import limited
from monet_like.capture.captured import Captured
from monet_like.capture.example_inputs import Example
from monet_like.cli.inspect import show_record
from monet_like.cli.terminal import Terminal
from monet_like.compiler.request import Request, captured_for
from monet_like.compiler.sources import Given
from monet_like.errors import InfeasibleError, MonetError, SolverError
from monet_like.ir.profile_file import Profile
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.units import Budget
from monet_like.job.job import Job
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.profile.settings import versions
from monet_like.replay.verify.comparison import Tensors, compare
from monet_like.replay.verify.steps import everything_after_a_step
from monet_like.replay.wrapper import ScheduleWrapper

CPU = torch.device("cpu")
MODE = "inplace_multiway_newnode"
#: A case takes a tenth of a second; under load, several.
LIMIT_SECONDS = 60.0
#: Beyond what the process has when it begins.
MOST_BYTES = 2 * 2**30
#: Of plain PyTorch's peak.
BUDGETS, SHARES = (0.6, 1.0, 2.0), (0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
#: Calls of the interpreter that no file may cause.
FORBIDDEN = (
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect",
)  # fmt: skip


class Pictures(nn.Module):
    """Convolutions, batch norms, dropout, and two inputs, one of which wants its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.drop, self.head = nn.Conv2d(8, 8, 3), nn.Dropout(0.3), nn.Linear(8 * 36, 5)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        x = self.norm(self.first(x)).relu() + shift
        return self.head(self.drop(self.second(x).relu()).flatten(1))


class Words(nn.Module):
    """An embedding, layer norms and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass(frozen=True)
class Subject:
    """A model with a valid schedule and profile, and what a step of it leaves in plain PyTorch."""

    model: nn.Module
    example: Example
    captured: Captured
    record: ScheduleRecord
    profile: Profile
    plain: Tensors

    def request(self, strategy: str = "heuristic") -> Request:
        """To plan it; without a solver."""
        return Request(self.model, self.example, MODE, "net", strategy=strategy, time_limit_seconds=0.2)


def subjects() -> tuple[Subject, ...]:
    """The models, each planned with as little memory as the local search finds of some shares of plain PyTorch's."""
    torch.manual_seed(0)
    pictures = (torch.randn(4, 3, 8, 8), torch.randn(4, 8, 8, 8, requires_grad=True))
    made = []
    for model, args in ((Pictures(), pictures), (Words(), (torch.randint(0, 20, (3, 7)),))):
        example: Example = (args, {})
        request = Request(model.train(), example, MODE, "net", strategy="heuristic", time_limit_seconds=2.0)
        captured = captured_for(request, example)
        profile = Profile("roofline:cpu", roofline(captured, DEVICES["cpu"]), "", versions())
        record = next(filter(None, (_planned(request, captured, profile, share) for share in SHARES)))
        plain = everything_after_a_step(copy.deepcopy(model), example)
        made.append(Subject(model, example, captured, record, profile, plain))
    return tuple(made)


def _planned(request: Request, captured: Captured, profile: Profile, share: float) -> ScheduleRecord | None:
    """A schedule within a share of plain PyTorch's peak, if one is found."""
    try:
        return Job(request, CPU, Given(profile), captured=captured).plan(Budget(share=share)).record
    except (InfeasibleError, SolverError):
        return None


# Mutations ------------------------------------------------------------------------------------------------------

_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**300, 10**400,
    0.0,
    -0.0, 0.5, -1.5, 1e-320, 1e300, float("inf"), float("-inf"), float("nan"), True, False,
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (
    None, "", "x", "0", "\x00", "\ud800", "é" * 50, "a" * 10_000, [], {}, [[]], [1, "1"], {"a": 1}, (), b"", b"bytes",
    {1: 2}, "normal", "conv", "float64", "int64", "bfloat16", "float32", "channels_last", "dropit0.5", "zeros",
    "os.system",
)  # fmt: skip


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, copy, insert or overwrite some bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at, to = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        what = draw.randrange(8)
        if what < 3 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        elif what == 3:
            data = data[: at if draw.random() < 0.3 else to] if to else data
        elif what == 4:
            data = data[:at] + data[min(to, at + 40) :]
        elif what == 5:
            data = data[:to] + data[at : min(to, at + 40)] * draw.choice((1, 2, 50)) + data[to:]
        elif what == 6:
            data = data[:at] + draw.randbytes(draw.randrange(1, 12)) + data[at:]
        else:
            filling = draw.choice((b"\x00", b"\xff", b"}", b"[", b'{"a":', b"9", b"."))
            data = data[:at] + filling * draw.choice((1, 4, 8, 20_000)) + data[min(to, at + 8) :]
    return data


def damaged_content(content: Any, draw: random.Random, *, numbers: bool) -> Any:
    """Change some of the leaves, or of the lists and dicts, of plain data."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = [place for place in _places(content) if not numbers or _is_number(place[0][place[1]])]
        if not places:
            return content
        holder, key = draw.choice(places)
        old = holder[key]
        if numbers:
            holder[key] = _another_number(old, draw)
            continue
        what = draw.randrange(7)
        if what == 0:
            del holder[key]
        elif what == 1:
            holder[key] = copy.deepcopy(draw.choice((*_OTHERS, *_NUMBERS)))
        elif what == 2:
            other, place = draw.choice(places)
            holder[key] = copy.deepcopy(other[place])
        elif what == 3 and isinstance(old, list) and old:
            draw.shuffle(old)
        elif what == 4 and isinstance(old, list) and old:
            old.insert(draw.randrange(len(old) + 1), copy.deepcopy(draw.choice(old)))
        elif what == 5 and isinstance(holder, dict):
            holder[draw.choice(("more", "forward", "costs", 3, None))] = old
        else:
            for _ in range(draw.choice((1, 1, 100))):
                old = [old]
            holder[key] = old
    return content


def _another_number(old: Any, draw: random.Random) -> Any:
    near: tuple[Any, ...] = (old + 1, old - 1, old * 2, -old, float(old) if abs(old) < 2**60 else 0.5)
    return draw.choice(near) if draw.random() < 0.6 else draw.choice(_NUMBERS)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every list item and dict value, as what holds it and its place there."""
    found: list[tuple[Any, Any]] = []
    pending = [content]
    while pending:
        holder = pending.pop()
        if isinstance(holder, dict | list):
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            found += ((holder, key) for key in keys)
            pending += (holder[key] for key in keys)
    return found


def damaged_schedule(content: Any, draw: random.Random) -> Any:
    """Other decisions of the same size: what runs, what runs again, which way is taken."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 2, 6))):
        forward, again, ways = content["forward"], content["again"], content["ways"]
        tasks = max([*forward, *(t for ts in again for t in ts)], default=0) + 1
        what, slot = draw.randrange(4), draw.randrange(len(ways))
        if what == 0:
            ways[slot] = draw.randrange(4)
        elif what == 1:
            _toggle(forward, draw.randrange(tasks + 1))
        else:
            _toggle(again[slot], draw.randrange(tasks + 1))
    return content


def _json(content: Any) -> bytes:
    return json.dumps(content, default=str, skipkeys=True).encode()


def _toggle(tasks: list[int], task: int) -> None:
    tasks[:] = sorted(set(tasks) ^ {task})


# Cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a mutation.

    Attributes:
        kind: ``schedule`` or ``profile``, and what was changed.
        end: ``refused``, ``right``, or a fault: what happened.
        told: the error's words.
    """

    number: int
    kind: str
    end: str
    told: str
    seconds: float

    @property
    def is_fault(self) -> bool:
        """Whether it is neither refused nor right."""
        return self.end not in ("refused", "right")


class _TooLongError(BaseException):
    """A case took longer than `LIMIT_SECONDS`."""


class Mutations:
    """Mutations by number.

    Args:
        seed: others give other mutations.
        folder: where files are written.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder, self.subjects = seed, folder, subjects()
        self._ran: list[str] = []
        self._watching = False
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: Any) -> None:
        if self._watching and event in FORBIDDEN:
            self._ran.append(event)

    def outcome(self, number: int) -> Outcome:
        """Make a mutation and see what comes of it."""
        draw = random.Random(f"{self.seed}:{number}")
        subject = draw.choice(self.subjects)
        kind, data = self.mutation(subject, draw)
        path = self.folder / "mutated"
        path.write_bytes(data)
        started = time.monotonic()
        self._ran.clear()
        use = self._schedule if kind.startswith("schedule") else self._profile
        try:
            with limited(LIMIT_SECONDS, _TooLongError()), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                end, told = use(subject, path, draw)
        except MonetError as error:
            end, told = "refused", str(error)
            if "\n" in told.strip():
                end = "refused in several lines"
        except _TooLongError:
            end, told = "took too long", ""
        except BaseException as error:
            end, told = f"raised {type(error).__name__}", str(error)
        finally:
            self._watching = False
        if self._ran:
            end, told = "ran code", ", ".join(self._ran)
        return Outcome(number, kind, end, told, time.monotonic() - started)

    def mutation(self, subject: Subject, draw: random.Random) -> tuple[str, bytes]:
        """What is changed, and the file's content."""
        path = self.folder / "valid"
        if draw.random() < 0.7:
            subject.record.save(path)
            data = path.read_bytes()
            what = draw.choice(("bytes", "structure", "numbers", "numbers", "decisions"))
            if what == "bytes":
                return "schedule, bytes", damaged_bytes(data, draw)
            if what == "decisions":
                return "schedule, decisions", _json(damaged_schedule(json.loads(data), draw))
            return f"schedule, {what}", _json(damaged_content(json.loads(data), draw, numbers=what == "numbers"))
        subject.profile.save(path)
        data = path.read_bytes()
        what = draw.choice(("bytes", "structure", "numbers"))
        if what == "bytes":
            return "profile, bytes", damaged_bytes(data, draw)
        return f"profile, {what}", _json(damaged_content(json.loads(data), draw, numbers=what == "numbers"))

    def _schedule(self, subject: Subject, path: Path, draw: random.Random) -> tuple[str, str]:
        """Load it, show it, train with it."""
        self._watching = True
        record = ScheduleRecord.load(path)
        self._watching = False
        show_record(Terminal(), record)
        return self._trained(subject, record)

    def _trained(self, subject: Subject, record: ScheduleRecord) -> tuple[str, str]:
        same = all(
            getattr(record, name) == getattr(subject.record, name)
            for name in ("mode", "ablation", "autocast", "made_last", "inputs")
        )
        wrapped = ScheduleWrapper(
            copy.deepcopy(subject.model), record, captured=subject.captured if same else None
        )  # what is captured anew takes most of the time
        found = everything_after_a_step(wrapped, subject.example)
        wrong = [verdict for verdict in compare(subject.plain, found) if verdict.error]
        if wrong:
            return "trained with other results", f"{wrong[0].name}: {wrong[0].error:.2e}"
        return "right", ""

    def _profile(self, subject: Subject, path: Path, draw: random.Random) -> tuple[str, str]:
        """Load it, plan with it, train with the plan."""
        self._watching = True
        profile = Profile.load(path)
        self._watching = False
        request = subject.request(draw.choice(("store_all", "chen_sqrt", "heuristic")))
        share = draw.choice(BUDGETS)
        compiled = Job(request, CPU, Given(profile), captured=subject.captured).plan(Budget(share=share))
        return self._trained(subject, compiled.record)


def summary(outcomes: list[Outcome], seed: int) -> str:
    """The figures, for the manual."""
    counts = Counter(outcome.end for outcome in outcomes)
    kinds = Counter(outcome.kind for outcome in outcomes)
    right = Counter(outcome.kind for outcome in outcomes if outcome.end == "right")
    faults = [outcome for outcome in outcomes if outcome.is_fault]
    lines = [
        f"{len(outcomes):,} mutations of schedule and profile files (seed {seed}): {counts['refused']:,} refused in "
        f"one sentence, {counts['right']:,} trained with plain PyTorch's outputs, gradients and buffers to the bit, "
        f"{len(faults):,} faults; the slowest took {max(outcome.seconds for outcome in outcomes):.1f} s.",
        *(f"  {kind}: {number:,}, of which {right[kind]:,} trained" for kind, number in sorted(kinds.items())),
        *(f"fault {o.number}: {o.kind}: {o.end}: {o.told[:300]}" for o in faults),
    ]
    return "\n".join(lines)


@click.command()
@click.option("--count", default=10_000, show_default=True, help="How many mutations.")
@click.option("--first", default=0, show_default=True, help="Number of the first one.")
@click.option("--seed", default=0, show_default=True, help="Others give other mutations.")
def main(count: int, first: int, seed: int) -> None:
    """Damage files and see what comes of it; exit code 1 if any outcome is a fault."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        mutations = Mutations(seed, Path(folder))
        most = status_bytes("VmData") + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        for outcome in map(mutations.outcome, range(first, first + count)):
            outcomes.append(outcome)
            if outcome.is_fault:
                click.echo(f"fault {outcome.number}: {outcome.kind}: {outcome.end}: {outcome.told[:300]}", err=True)
            if len(outcomes) % 500 == 0:
                click.echo(f"{len(outcomes)} of {count}", err=True)
                gc.collect()
    click.echo(summary(outcomes, seed))
    sys.exit(any(outcome.is_fault for outcome in outcomes))


if __name__ == "__main__":
    main()
