"""`Planning`: the keywords that say how a plan is made. `Settings`: all that a plan is asked for, checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from ..compiler.request import OPTIMIZERS
from ..errors import SolverError, UsageError
from ..ir.defaults import EXACT_MODE, MODE, SOLVER
from ..ir.mode import OFFLOAD, parse_mode
from ..ir.units import MOST_SECONDS, Budget, parse_budget
from ..replay.wrapper import BACKENDS
from ..solvers.interface import check_solver
from .agreement import Sharing
from .earlier_menus import EarlierMenus

#: How much time a plan may take; see `Planning`.
EFFORTS = ("auto", "quick", "full")
#: What a call does that no plan serves; see `Planning`.
ON_NEW_INPUT = ("plan", "plain", "error")
#: Where weights of blocks may lie; see `Planning`.
WEIGHTS = ("device", "auto")
#: Of the integer program.
TIME_LIMIT_SECONDS = 60.0


class Planning(TypedDict, total=False):
    """Keywords of `monet_like.auto_schedule` and of the Trainer's callback `MemoryBudget`. All may be left out.

    The search:

    * ``effort``: ``full``: measure every operator and solve the integer program, in minutes. ``quick``: in about ten
      seconds, times that are partly estimated and the local search; memory is as exact. ``auto`` (default): ``full`` if
      a time limit is given; else quick the first time, and full at the next start, in one process of each machine.
    * ``solver`` (default HIGHS), ``time_limit_seconds`` (60), ``gap`` (0.01): of the integer program. With ``blocks``
      the limit is for the menu of each kind of block; the choice among menus, mostly a second, may take the limit or 20
      seconds, whichever is more, up to three times. Where it is quick, all of that has 20 seconds together.
    * ``mode``: which variants may be used, in MONeT's words (`monet_like.ir.mode`), instead of ``exact``. Without it
      activations may be on the host on a GPU, as with the word ``offload``.
    * ``verbose``: show progress and a line at the end on stderr; None (default): if that is a terminal or a notebook.
      The logger ``monet_like`` gets that line in any case (level INFO).

    Calls of other forms:

    * ``lengths``: plan at the first call for inputs of each of these lengths (second dimension), such as ``[512, 1024,
      2048]``. Later inputs follow the plan for the next larger length, so nothing is planned in between. A share of
      plain PyTorch's peak is of that at the largest length.
    * ``on_new_input``: what a call does that no plan serves, once there is one: larger inputs, another dtype, frozen
      layers. ``plan`` (default): it is planned within the first plan's bytes, and runs as plain PyTorch with one
      warning if that fails after training has begun. ``plain``: it runs as plain PyTorch with one warning. ``error``:
      it raises.

    The training loop:

    * ``backend``: ``eager`` (default), or ``inductor``; see `ScheduleWrapper`.
    * ``cuda_graphs``: None (default), True or False; see `ScheduleWrapper`. Blocks have none.
    * ``optimizer_in_backward``: hooks of the loop (``register_post_accumulate_grad_hook``) step and free each gradient
      in the backward, so the plan need not have room for all gradients at once. Without such hooks the step needs more
      memory than planned. Plans of blocks have room for all gradients in any case.
    * ``loss``: with ``blocks``: from the model's result to the scalar whose backward runs, so that its memory counts.
      Default: the result's own ``loss``, or one that takes no memory.
    * ``keeps_result``: with ``blocks``: the loop holds the model's result until the backward has ended, as in ``out =
      model(x)`` (default True). False: it holds the loss alone, as in ``model(x).loss.backward()``, and logits are free
      by then.
    * ``same_plan``: with ``blocks``: the processes of the default group have equal models and inputs, the first plans
      for all, and all must plan together (default True). False: each plans for itself.
    * ``weights``: ``device`` (default): all weights are on the device. ``auto``: frozen weights of ``blocks`` (default:
      of all layers that have such) may lie in the host's memory and come to the device when their block runs, where the
      plan says so; see the manual's page on streamed weights. What fits stays on the device.
    """

    effort: str
    solver: str
    time_limit_seconds: float | None
    gap: float
    mode: str
    verbose: bool | None
    lengths: Sequence[int]
    on_new_input: str
    backend: str
    cuda_graphs: bool | None
    optimizer_in_backward: bool
    loss: Callable[[Any], torch.Tensor] | None
    keeps_result: bool
    same_plan: bool
    weights: str


@dataclass(frozen=True)
class Settings:
    """All that a plan is asked for; see `monet_like.auto_schedule` and `Planning`.

    Attributes:
        loss: from the model's result to a scalar; None: a loss that takes no memory.
        sharing: how the processes of the default group plan.
        earlier: menus of quick plans by these settings.
        told: of parts that were found: the end of the line that says what is planned.
        offloads: on a GPU activations may be on the host; False where the user's mode has no word for it.
    """

    budget: Budget
    mode: str = MODE
    optimizer: str = "none"
    effort: str = "auto"
    solver: str = SOLVER
    time_limit_seconds: float = TIME_LIMIT_SECONDS
    gap: float = 0.01
    verbose: bool | None = None
    lengths: tuple[int, ...] = ()
    on_new_input: str = "plan"
    backend: str = "eager"
    cuda_graphs: bool | None = None
    optimizer_in_backward: bool = False
    loss: Callable[[Any], torch.Tensor] | None = None
    keeps_result: bool = True
    sharing: Sharing = "same"
    weights: str = "device"
    earlier: EarlierMenus = field(default_factory=EarlierMenus, compare=False, repr=False)
    told: str = ""
    offloads: bool = True

    @staticmethod
    def of(
        memory_budget: str | int | Budget, exact: bool | None, optimizer: str, planning: Planning, *, blocks: bool
    ) -> Settings:
        """Check the arguments of `monet_like.auto_schedule`, all of them.

        Args:
            blocks: whether blocks are planned, not the model as a whole.

        Raises:
            UsageError: the first one that is wrong, in words.
        """
        _check_names(planning, blocks=blocks)
        budget = parse_budget(memory_budget, "memory_budget")
        given: dict[str, Any] = dict(planning)
        lengths = given.get("lengths", ())
        given["lengths"] = tuple(lengths) if isinstance(lengths, Iterable) else lengths
        for name, value in {**given, "exact": exact, "optimizer": optimizer}.items():
            is_right, words = _RULES[name]
            if not _holds(is_right, value):
                raise UsageError(f"{name} {list(value) if isinstance(value, tuple) else value!r} {words}")
        given["offloads"] = "mode" not in given or OFFLOAD in parse_mode(given["mode"])
        given["mode"] = _mode(exact, given)
        parse_mode(given["mode"])
        with suppress(SolverError):  # it is not installed: a quick plan needs none
            check_solver(given.get("solver", SOLVER))
        if given.get("time_limit_seconds") is None:
            given["time_limit_seconds"] = TIME_LIMIT_SECONDS
        elif given.get("effort", "auto") == "auto":
            given["effort"] = "full"
        given["sharing"] = "same" if given.pop("same_plan", True) else "alone"
        return Settings(budget, optimizer=optimizer, **given)

    @property
    def quick(self) -> bool:
        """Costs are partly estimated, and the local search plans instead of the integer program."""
        return self.effort != "full"

    @property
    def key(self) -> tuple[Any, ...]:
        """What plans depend on, of a whole model and of blocks."""
        return (
            self.budget.bytes or self.budget.share, self.mode, self.solver.upper(), self.gap, self.time_limit_seconds,
            self.optimizer,
        )  # fmt: skip

    @property
    def refines(self) -> bool:
        """A quick plan of an earlier start is replaced by a full one."""
        return self.effort == "auto"


def _mode(exact: bool | None, given: Mapping[str, Any]) -> str:
    if exact is not None and "mode" in given:
        raise UsageError(
            f"exact={exact} and mode={given['mode']!r} both say which variants may be used; give one of them: exact, "
            "or a mode in MONeT's words"
        )
    if exact and given.get("backend") == "inductor":
        raise UsageError(
            "exact=True and backend='inductor' contradict each other: code of Inductor rounds in its own way; leave "
            "one of them out"
        )
    mode: str = given.get("mode", EXACT_MODE if exact else MODE)
    return mode


def _check_names(planning: Planning, *, blocks: bool) -> None:
    known = list(Planning.__annotations__)
    for name in planning:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, "exact", "optimizer", "blocks", "memory_budget"), 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise UsageError(f"there is no keyword {name!r}{hint} Those for planning are {', '.join(sorted(known))}")
    if blocks:
        if planning.get("cuda_graphs"):
            raise UsageError("cuda_graphs=True is for a schedule of the whole model; blocks have no CUDA graphs")
        return
    for name, is_set in (
        ("loss", planning.get("loss") is not None),
        ("keeps_result", not planning.get("keeps_result", True)),
    ):
        if is_set:
            raise UsageError(
                f"{name} is for blocks; a schedule of the whole model counts what the model's forward computes"
            )


def _holds(is_right: Callable[[Any], bool], value: Any) -> bool:
    try:
        return bool(is_right(value))
    except (TypeError, ValueError):
        return False


def _one_of(known: Sequence[Any]) -> tuple[Callable[[Any], bool], str]:
    return known.__contains__, f"is unknown; choose one of {', '.join(map(str, known))}"


_YES_OR_NO: tuple[Callable[[Any], bool], str] = (True, False).__contains__, "must be True or False"
_MAYBE: tuple[Callable[[Any], bool], str] = (True, False, None).__contains__, "must be True, False or None"
_TEXT: tuple[Callable[[Any], bool], str] = lambda value: isinstance(value, str), "must be text"

#: What each argument must be, and the words for one that is not.
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "effort": _one_of(EFFORTS),
    "solver": _TEXT,
    "time_limit_seconds": (
        lambda value: value is None or 0 < value <= MOST_SECONDS,
        f"must be more than 0 and at most {MOST_SECONDS:g} seconds",
    ),
    "gap": (lambda value: 0 <= value < 1, "must be at least 0 and less than 1, such as 0.01 for 1 %"),
    "mode": _TEXT,
    "verbose": _MAYBE,
    "lengths": (
        lambda value: all(isinstance(length, int) and length >= 1 for length in value),
        "must be whole numbers of at least 1",
    ),
    "on_new_input": _one_of(ON_NEW_INPUT),
    "backend": _one_of(BACKENDS),
    "cuda_graphs": _MAYBE,
    "optimizer_in_backward": _YES_OR_NO,
    "loss": (lambda value: value is None or callable(value), "must be a function of the model's result, or None"),
    "keeps_result": _YES_OR_NO,
    "same_plan": _YES_OR_NO,
    "weights": _one_of(WEIGHTS),
    "exact": _MAYBE,
    "optimizer": _one_of(tuple(OPTIMIZERS)),
}
