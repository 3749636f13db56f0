"""`auto_schedule`: plans a model when it is first called, and keeps the schedules in a cache."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..capture.captured import Captured
from ..capture.checks import check_unscripted, is_sharded
from ..capture.example_inputs import device_of, with_length
from ..capture.guards.holders import Holder
from ..capture.guards.reads import Change
from ..capture.precision import autocast_name
from ..capture.trace.reasons import OTHER_PARTS
from ..capture.trees import flattened
from ..compiler.progress import Progress
from ..compiler.request import Request, captured_for
from ..errors import CaptureError, MonetError, UsageError, warn_caller
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import Budget
from ..profile.card_budget import on_card
from ..replay.checks.compatibility import OTHER_STEP, call_difference
from ..replay.kept_steps import KeptStep
from ..replay.stand_in import SignedAsModel
from ..replay.stepping import NewInput, is_empty
from ..replay.wrapper import ScheduleWrapper
from .agreement import Sharing
from .block_calls import plans_of
from .blocks import BlockNames, block_plan, schedule_blocks, schedule_parts
from .planning import Planning, Settings
from .whole_plan import captured_as, is_of, plan_or_load

if TYPE_CHECKING:
    from typing_extensions import Unpack


def auto_schedule(
    model: nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_budget: str | int = "8 GB",
    exact: bool | None = None,
    blocks: BlockNames | None = None,
    optimizer: str = "none",
    **planning: Unpack[Planning],
) -> nn.Module:
    """Capture, profile, plan and wrap ``model`` so that its training step fits ``memory_budget``.

    Args:
        model: on the device it will train on; in training mode, if there are example inputs.
        args, kwargs: example inputs; a tensor, or a tuple of arguments. Without any, the first training call is planned
            for, which takes longer for that.
        memory_budget: of the whole step: ``"8 GB"``, bytes as an int, ``"60%"`` of plain PyTorch's peak for the inputs
            that are planned first, or ``"card"``: what is free on the GPU then, less 5 % of it and at least 1 GB. Later
            plans have as many bytes.
        exact: True: no operator variant that rounds in another way than PyTorch's own operators; on a CPU gradients are
            equal to plain PyTorch's to the bit. False (default): equal to rounding; steps are faster, and smaller
            budgets are feasible.
        blocks: give each of these modules of ``model`` a schedule of its own, all under the one budget, and run the
            rest of the model as it is: ``model.layers``, a list of modules, or a pattern of their names such as
            ``"layers.*"``.
        optimizer: whose state to count; a key of `monet_like.compiler.request.OPTIMIZERS`, such as adamw.
        planning: how the plan is made: effort, solver, lengths, loss and others, see `Planning`.

    Returns:
        The wrapped module, with the same arguments, results and gradients. Plans and profiles are cached, so a
        second call with the same model, inputs and budget solves nothing. Where the whole cannot be captured, its
        largest parts have the schedules. With ``blocks``: ``model`` itself, whose blocks are wrapped.

    Raises:
        UsageError: an argument is wrong.
        InfeasibleError: no schedule fits; the message says what would.
        CaptureError: neither the model nor a part of it can be captured; with ``blocks``: one of them cannot. What the
            forward itself raises in the first call is raised as it is.
    """
    by_blocks = blocks is not None or planning.get("weights", "device") != "device"
    settings = Settings.of(memory_budget, exact, optimizer, planning, blocks=by_blocks)
    if by_blocks:
        return schedule_blocks(model, args, kwargs, blocks, settings)
    wrapped = AutoSchedule(model, settings)
    if args is not None or kwargs is not None:
        if not model.training:
            raise UsageError("the model is in eval mode; call model.train() before auto_schedule")
        wrapped.prepare(*(args if isinstance(args, tuple) else () if args is None else (args,)), **(kwargs or {}))
    return wrapped


class AutoSchedule(ScheduleWrapper):
    """A `ScheduleWrapper` that plans when it is called with inputs for which it has no schedule.

    Attributes:
        record: the schedule of the latest plan; None before the first one, and where parts have schedules: see
            `monet_like.block_plan`.
        records: all of them.
    """

    record: ScheduleRecord | None  # type: ignore[assignment]
    _OWN = ScheduleWrapper._OWN | {"records", "settings"}

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        nn.Module.__init__(self)
        self._share(model, settings.backend, settings.cuda_graphs)
        self.settings = settings
        self._on_new_input, self._shows_progress = settings.on_new_input, settings.verbose
        self.record = None
        self.records: list[ScheduleRecord] = []
        self._parts: Sequence[str] | None = None  # that have schedules, where the whole has none

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        if self._parts and (plan := block_plan(self._model)):
            names = ", ".join(self._parts)
            return f"schedules of {len(self._parts)} parts: {names}; whole step: {plan.numbers}"
        return super().extra_repr() if self.record else "schedule: made at the first training call"

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan for calls with such arguments, now instead of at the first of them; not for a batch of no elements."""
        kwargs = self._without_cache(args, kwargs)
        leaves, spec = flattened((args, kwargs))
        if is_empty(leaves):
            return
        if self._found() is not None:
            if plans := plans_of(self._model) or plans_of(self):
                plans(self._model, args, kwargs)
            return
        try:
            check_unscripted(self._model)
            self._new_step(self._key(leaves, spec), args, kwargs)
        except CaptureError as error:
            self._plan_parts(args, kwargs, error)
        self._begun = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a module's; parts of a sharded model are planned before ``fully_shard`` begins its step."""
        begins = not self._begun and self._parts is None and self.training and torch.is_grad_enabled()
        if begins and any(map(is_sharded, self.modules())):
            self._plan_parts(args, self._without_cache(args, kwargs), CaptureError("its parameters are sharded"))
        return super().__call__(*args, **kwargs)

    @SignedAsModel
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, whose backward follows the schedule, or those of its parts."""
        if self.training and torch.is_grad_enabled() and not self._begun and self._found() is None:
            try:
                check_unscripted(self._model)
                return ScheduleWrapper.forward(self, *args, **kwargs)
            except CaptureError as error:
                self._plan_parts(args, self._without_cache(args, kwargs), error)
        return ScheduleWrapper.forward(self, *args, **kwargs)

    def _found(self) -> Sequence[str] | None:
        """The parts that have schedules, when a search in another thread has ended; None: the whole has, or nothing."""
        with self._lock:
            return self._parts

    def _step_or_plain(self, *call: Any) -> tuple[KeptStep | None, Mapping[str, Holder] | None]:
        return (None, None) if self._parts is not None else super()._step_or_plain(*call)

    def _plan_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any], refused: CaptureError) -> None:
        """Plan the parts that can be captured, unless another thread has done so.

        Args:
            refused: why the whole cannot.
        """
        with self._lock:
            if self._parts is None:
                self._search_parts(args, kwargs, refused)

    def _search_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any], refused: CaptureError) -> None:
        why = str(refused).removesuffix(OTHER_PARTS)
        sharded = any(map(is_sharded, self.modules()))
        sharing: Sharing = "alone"
        if sharded or any(isinstance(module, DistributedDataParallel) for module in self.modules()):
            sharing = "own" if self.settings.sharing == "alone" else "same"  # rehearsals need all processes
        self._parts = ()
        try:
            with Progress(quiet=self.settings.verbose is False):
                self._parts = schedule_parts(
                    self if sharded else self._model,
                    (args, kwargs),
                    replace(self.settings, sharing=sharing),
                    why.partition(" (at ")[0].partition("; ")[0],
                )
        except MonetError:
            raise
        except Exception as error:
            if _is_from_forward(error, self._model):
                raise error from None  # as plain PyTorch's call does
            raise refused from error
        finally:
            self._parts = self._parts or None
        if self._parts is None:
            raise CaptureError(f"{why}; none of its parts of several operators can be captured, either") from refused
        self._begun, self.plans_its_memory = True, False
        if self._graphs is not None and self._graphs.always:
            warn_caller(f"{type(self._model).__name__} has no CUDA graphs: its parts have schedules of their own")
        if self._arena is not None:
            self._arena = None
            warn_caller(
                f"no memory is placed for {type(self._model).__name__}, whose parts have schedules of their own"
            )

    def _step(self, *call: Any) -> KeptStep | None:
        with Progress(quiet=self.settings.verbose is False):  # of all stages, from the capture on
            return super()._step(*call)

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured | None, change: Change | None
    ) -> tuple[ScheduleRecord, Captured]:
        settings, device = self.settings, device_of(self, (args, kwargs))
        request = Request(
            self._model, (args, kwargs), settings.mode, type(self._model).__qualname__, False, settings.optimizer,
            "milp", settings.solver, settings.time_limit_seconds, settings.gap, autocast=autocast_name(device),
            optimizer_in_backward=settings.optimizer_in_backward,
        )  # fmt: skip
        if settings.lengths and not self.records:
            self._plan_lengths(request, device)
        captured = captured_for(request, request.example)
        reason = ""
        for record in sorted(self.records, key=_elements):  # the next larger one
            if differs := call_difference(record, self._model, args, kwargs):
                reason = f"planned {differs[0]}, called {differs[1]}"
                continue
            reason = ""
            found = captured_as(record, request, captured)  # what pays at its own, larger batch
            if is_of(record, found, device):
                return record, found
        if self.records:
            reason = reason or (str(change) if change else OTHER_STEP)
            if self._on_new_input != "plan":
                raise NewInput(f"no plan of {type(self._model).__name__} serves this call: {reason}")
            warn_caller(f"planning {type(self._model).__name__} anew: {reason}")
        record = self._plan(request, device, captured)
        with Progress(quiet=settings.verbose is False, first="compile"):
            return record, captured_as(record, request, captured)

    def _plan_lengths(self, request: Request, device: torch.device) -> None:
        """Plan for every length that is expected, the largest first: a share is of the peak at that."""
        for length in sorted(self.settings.lengths, reverse=True):
            there = replace(request, example=with_length(request.example, length))
            self._plan(there, device, captured_for(there, there.example))

    def _plan(self, request: Request, device: torch.device, captured: Captured) -> ScheduleRecord:
        """Plan within the budget, which is that of the first plan in bytes."""
        budget = self.settings.budget
        if self.records:
            budget = Budget(self.records[0].budget_bytes)
        settings = replace(self.settings, budget=on_card(budget, device, self._model, request.example))
        record = plan_or_load(request, settings, device, captured)
        self.records.append(record)
        self.record = record
        return record


def _is_from_forward(error: BaseException, model: nn.Module) -> bool:
    """Whether a model's own forward was running when an error was raised."""
    code = getattr(type(model).forward, "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def _elements(record: ScheduleRecord) -> int:
    """How many elements the inputs of a plan have."""
    return sum(math.prod(spec.shape) for spec in record.inputs)
