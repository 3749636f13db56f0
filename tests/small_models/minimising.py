"""A case that fails becomes smaller as long as it fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .cases import Case, Op
from .grammar import UnfitError
from .judging import Verdict, judge

SIMPLEST = {"behaviour": "ordinary", "autocast": "", "dtype": "float32", "budget": "plain", "mode": "normal"}


def minimise(
    case: Case, verdict: Verdict, *, judged: Callable[[Case], Verdict] = judge, seconds: float = 60.0
) -> tuple[Case, Verdict]:
    """The smallest case that was found with a verdict of the same sort, and its verdict.

    Args:
        case, verdict: that fails, and how.
        judged: how cases are judged.
        seconds: after which the smallest one so far is taken.
    """
    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                return case, verdict
            try:
                _ = smaller.source
                found = judged(smaller)
            except UnfitError:
                continue
            if found.sort == verdict.sort:
                case, verdict, changed = smaller, found, True
                break
    return case, verdict


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with less: trainer, operations, results, arguments, extents."""
    for name, simplest in SIMPLEST.items():
        if getattr(case, name) != simplest:
            yield replace(case, **{name: simplest})
    if case.budget not in ("plain", "smallest"):
        yield replace(case, budget="smallest")
    if "conv" in case.mode:
        yield replace(case, mode="inplace_multiway_newnode")
    for index in reversed(range(len(case.ops) - 1)):
        without = _without(case.ops, index)
        if without is not None:
            yield replace(case, ops=without)
    *ops, result = case.ops
    for position in range(1, len(result.reads)):
        reads = (*result.reads[:position], *result.reads[position + 1 :])
        ignored = tuple(i - (i > position) for i in result.arguments.get("ignored", ()) if i != position)
        yield replace(
            case, ops=(*ops, replace(result, reads=reads, arguments={**result.arguments, "ignored": ignored}))
        )
    for index, op in enumerate(case.ops):
        for name in op.arguments:
            if name != "shape":
                fewer = {k: v for k, v in op.arguments.items() if k != name}
                yield replace(case, ops=_with(case.ops, index, replace(op, arguments=fewer)))
            else:
                yield from _narrower(case, index, op)


def _narrower(case: Case, index: int, op: Op) -> Iterator[Case]:
    shape = op.arguments["shape"]
    for position, extent in enumerate(shape):
        for smaller in {1, 2, extent // 2}:
            if 0 < smaller < extent:
                shorter = (*shape[:position], smaller, *shape[position + 1 :])
                inputs = [  # all of the same shape, or sums would fail
                    replace(o, arguments={**o.arguments, "shape": shorter}) if o.arguments.get("shape") == shape else o
                    for o in case.ops
                ]
                yield replace(case, ops=tuple(inputs))


def _with(ops: tuple[Op, ...], index: int, op: Op) -> tuple[Op, ...]:
    return (*ops[:index], op, *ops[index + 1 :])


def _without(ops: tuple[Op, ...], index: int) -> tuple[Op, ...] | None:
    """The others; whoever read what it made reads what it read."""
    gone = ops[index]
    left = [op for i, op in enumerate(ops) if i != index]
    if not gone.reads:  # an input: whoever read it reads the first other one
        others = [op.name for op in left if op.kind == "input"]
        if not others:
            return None
        instead = others[0]
    else:
        instead = gone.reads[0]

    def other(name: str) -> str:
        return instead if re.fullmatch(gone.name + "[a-z]?", name) else name

    return tuple(
        replace(
            op,
            reads=tuple(map(other, op.reads)),
            arguments={k: v for k, v in op.arguments.items() if v != gone.name or k not in ("like", "tie")},
        )
        for op in left
    )


def reproduction(case: Case, verdict: Verdict) -> str:
    """A case as code to read and to run."""
    setting = f"mode {case.mode}, budget {case.budget}, trainer {case.behaviour}, {case.dtype}"
    setting += f", autocast {case.autocast}" if case.autocast else ""
    inputs = [f"#   {op.name}: {dict(op.arguments)}" for op in case.ops if op.kind == "input"]
    ignored = case.ops[-1].arguments.get("ignored")
    return "\n".join(
        (
            f"# {verdict.status}: {verdict.detail}",
            f"# {setting}, seed {case.seed}",
            *inputs,
            *([f"#   the loss leaves out results {ignored}"] if ignored else []),
            case.source.rstrip(),
            f"# {case!r}",
        )
    )
