"""Cases drawn from seeds."""

from __future__ import annotations

import warnings
from dataclasses import replace
from random import Random

from .cases import Case, Op, Writer
from .grammar import KINDS, UnfitError
from .judging import plainly

BUDGETS = ("plain", "70%", "45%", "smallest", "random")
MODES = ("normal", "inplace_multiway_newnode", "inplace_conv_multiway_newnode")
#: What a trainer does around the model; `judging.train` says how.
BEHAVIOURS = (
    *["ordinary"] * 6, "accumulate", "optimizer_in_backward", "two_forwards", "two_backwards", "retain_graph",
    "eval_between", "deepcopy", "fewer_samples", "autograd_grad",
)  # fmt: skip


def draw(seed: int, device: str = "cpu") -> Case:
    """The case of a seed; the same each time. Plain PyTorch can train it on a CPU.

    Args:
        device: where the case is trained; ``cpu`` or ``cuda``.
    """
    rng = Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1000):
            case = _drawn(rng, seed)
            if case is not None and not plainly(case)[2]:
                return replace(case, device=device)
    raise AssertionError(f"no model in 1000 attempts from seed {seed}")


def _drawn(rng: Random, seed: int) -> Case | None:
    writer = Writer()
    count = rng.choice((1, 1, 1, 2, 2, 3))
    dims = rng.choice((2, 2, 3, 3, 4, 4, 4, 4, 5))
    batch = rng.choice((2, 3, 4, 4, 1))
    shape = [batch, *(rng.choice((1, 2, 4, 4, 6) if dims > 3 else (1, 3, 4, 8)) for _ in range(dims - 1))]
    for number in range(count):
        writer.add(_input(rng, number, shape, tokens=rng.random() < 0.12))
    for number in range(rng.choice((2, 3, 4, 5, 6, 7, 8, 10))):
        _add(rng, writer, f"v{number}")
    wanted = [v for v in writer.values if v.name.startswith("v") and v.is_float]
    trained = [v for v in wanted if v.requires_grad]
    if not trained:
        return None
    open_ends = [v.name for v in wanted if v.name not in writer.read]
    reads = [trained[-1].name]
    reads += [name for name in open_ends if name not in reads and rng.random() < 0.7]
    reads += [v.name for v in wanted if v.name not in reads and rng.random() < 0.08]
    ignored = tuple(i for i in range(1, len(reads)) if rng.random() < 0.25)
    try:
        writer.add(Op("result", "result", tuple(reads), {"ignored": ignored} if ignored else {}), rng)
    except UnfitError:
        return None
    autocast = "bfloat16" if rng.random() < 0.12 else ""
    return Case(
        tuple(writer.ops),
        rng.choice(MODES),
        rng.choice(BUDGETS),
        rng.choice(BEHAVIOURS),
        autocast,
        "float64" if not autocast and rng.random() < 0.2 else "float32",
        seed,
    )


def _input(rng: Random, number: int, shape: list[int], tokens: bool) -> Op:
    arguments: dict[str, object] = {"shape": tuple(shape)}
    if tokens:
        arguments |= {"shape": tuple(shape[:2]), "dtype": "int64"}
    else:
        if rng.random() < 0.3:
            arguments["requires_grad"] = True
        if rng.random() < 0.25:
            arguments["layout"] = rng.choice(("last", "transposed", "strided", "expanded"))
    if number and rng.random() < 0.3:
        arguments["keyword"] = True
    return Op(f"x{number}", "input", (), arguments)


def _add(rng: Random, writer: Writer, name: str) -> None:
    """One operation that fits; the latest values, and those that nothing has read, are preferred."""
    kinds = list(KINDS.values())
    for _ in range(60):
        kind = rng.choices(kinds, [k.weight for k in kinds])[0]
        values = writer.values
        fresh = [v for v in values if v.name not in writer.read] or values
        reads = []
        for _ in range(kind.reads):
            pool = fresh if rng.random() < 0.7 else values[-4:] if rng.random() < 0.7 else values
            reads.append(rng.choice(pool).name)
        try:
            writer.add(Op(name, kind.name, tuple(reads)), rng)
        except UnfitError:
            continue
        return
