"""A case is trained by plain PyTorch and by a schedule, and everything that the two leave is compared."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from monet_like import ScheduleWrapper
from monet_like.capture.captured import Captured, TensorMeta
from monet_like.capture.example_inputs import input_spec
from monet_like.capture.precision import autocast_as, weights_layout
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request, captured_for
from monet_like.errors import MonetError
from monet_like.ir.program import Cost
from monet_like.ir.schedule import Schedule
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import simulate
from monet_like.plan.baseline import plain_report
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import find_start, smallest_known
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.devices import DEVICES
from monet_like.profile.measure import allocated_peak, have_workspaces
from monet_like.profile.roofline import roofline
from monet_like.replay.verify.steps import resident_bytes, unsaved_loss
from monet_like.runtime.operators import get_rng_state

from .cases import Case

STEPS = 3
#: Of the local search, for each plan.
EVALUATIONS = 150
#: Two results that agree to rounding differ by less than this, relative to the largest number around.
ROUNDING = {"float32": 2e-3, "float64": 1e-8}

#: Workspaces of operators that were measured for any case of this process.
_measured: dict[str, Cost] = {}
#: How often plain PyTorch has to repeat itself: on a GPU, sums in no fixed order are now and then the same by chance.
REPEATS = {"cpu": 1, "cuda": 4}

Change = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        status: right, refused (one sentence of ours), wrong (other numbers, or more memory than predicted), crashed, or
            invalid: plain PyTorch itself fails, gives no finite numbers, or does not repeat itself.
        detail: the sentence, the difference, or the error.
        share: of plain PyTorch's predicted peak that the schedule was allowed; 0 where none was made.
    """

    status: str
    detail: str = ""
    share: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status in ("wrong", "crashed")

    @property
    def sort(self) -> tuple[str, str]:
        """What two verdicts have in common that have the same cause: the status, and the kind of thing or of error."""
        return self.status, re.sub(r"^step \d+: ", "", self.detail).split(" ")[0]


def judge(case: Case, change: Change | None = None) -> Verdict:
    """Compare a schedule's training with plain PyTorch's.

    Args:
        change: made to the wrapped model before it trains, to see whether a fault would be noticed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = torch.get_default_dtype()
        try:
            return _judged(case, change)
        finally:
            torch.set_default_dtype(before)


def _judged(case: Case, change: Change | None) -> Verdict:
    plain, failure, reason = plainly(case)
    if reason:
        return Verdict("invalid", reason)
    share = 0.0
    try:
        record, captured = planned(case)
        share = record.peak_bytes / record.plain_peak_bytes
        wrapped = wrap(case, record, captured)
        ours = train(case, wrapped if change is None else change(wrapped))
    except MonetError as error:
        if failure is not None:
            return Verdict("right", "", share)
        return Verdict("refused", f"{type(error).__name__}: {error}", share)
    except Exception as error:
        if failure is not None and isinstance(error, type(failure)):
            return Verdict("right", "", share)
        return _unless_plain_differs(case, plain, Verdict("crashed", told(error), share))
    if failure is not None:
        return Verdict("wrong", f"trains where plain PyTorch says {told(failure)}", share)
    found = difference(case, plain, ours)
    if found:
        return _unless_plain_differs(case, plain, Verdict("wrong", found, share))
    try:
        wrapped = wrap(case, record, captured)
        peak = peak_of(case, wrapped if change is None else change(wrapped))
    except Exception as error:
        return Verdict("crashed", f"measuring: {told(error)}", share)
    if peak > record.peak_bytes and not case.takes_unknown_memory:
        return Verdict("wrong", f"peak {peak} bytes, predicted {record.peak_bytes}", share)
    return Verdict("right", "", share)


def plainly(case: Case) -> tuple[dict[str, Any], Exception | None, str]:
    """What plain PyTorch's training leaves, how it fails where a schedule has to fail as well, and why a case is no
    use.
    """
    try:
        left = train(case, case.model())
    except Exception as error:
        if case.behaviour == "optimizer_in_backward":  # which changes parameters that others may still need
            return {}, error, ""
        return {}, None, told(error)
    return left, None, "" if _usable(left) else "numbers are not finite, or there is no gradient"


def _unless_plain_differs(case: Case, plain: dict[str, Any], verdict: Verdict) -> Verdict:
    """The verdict, if plain PyTorch repeats itself to the bit and its batch norm is right."""
    for _ in range(REPEATS[case.device]):
        exact = difference(case, plain, train(case, case.model()), rounding=0.0)
        if exact:
            return Verdict("invalid", f"plain PyTorch differs from itself: {exact}")
    with _BatchNormInOneLayout():
        again = train(case, case.model())
    wrong = difference(case, plain, again, rounding=ROUNDING[case.dtype] / 100)
    return Verdict("invalid", f"plain PyTorch's batch norm is wrong for a layout: {wrong}") if wrong else verdict


class _BatchNormInOneLayout(TorchDispatchMode):
    """Batch norm's gradient is made from an input and a gradient in rows.

    PyTorch's own on a CPU takes one that is only channels-last and one that is only in rows to lie alike where extents
    of 1 hide it, as in x of strides (1, 1, 2, 4) and a gradient of strides (4, 2, 1, 1), both 1 x 2 x 2 x 1, and gives
    other numbers (seen with PyTorch 2.14).
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.native_batch_norm_backward.default:
            grad, x, *others = args
            args = (grad.contiguous(), x.contiguous(), *others)
        return op(*args, **(kwargs or {}))


def told(error: BaseException) -> str:
    """An error's kind and the first line of its message."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"


def _usable(left: dict[str, Any]) -> bool:
    gradients = [v for k, v in left.items() if "gradient of" in k and isinstance(v, torch.Tensor)]
    finite = all(bool(v.isfinite().all()) for k, v in left.items() if isinstance(v, torch.Tensor) and "output" not in k)
    return finite and any(bool(g.count_nonzero()) for g in gradients)


# Plans


def planned(case: Case) -> tuple[ScheduleRecord, Captured]:
    """The schedule for a case's first step, and what it is of."""
    model, example = case.model(), case.inputs(0)
    request = Request(model, example, case.mode, "small model", autocast=case.autocast, profile_batch=10**6)
    captured = captured_for(request, example)
    costs = costs_of(request, captured)
    schedule, plain_bytes = plan_of(case, captured, costs)
    report = simulate(captured.program, schedule, costs)
    record = ScheduleRecord(
        schedule, "small model", tuple(input_spec(t) for t in _tensors(example)), case.mode, report.peak_bytes,
        captured.program.fingerprint, case.device, {}, report.peak_bytes, report.seconds, plain_bytes, 0.0,
        "heuristic", "feasible", autocast=case.autocast, layout=weights_layout(model), made_last=captured.made_last,
    )  # fmt: skip
    return record, captured


def wrap(case: Case, record: ScheduleRecord, captured: Captured) -> ScheduleWrapper:
    """A new model of a case that follows a schedule."""
    return ScheduleWrapper(case.model(), record, example=case.inputs(0), captured=captured)


def costs_of(request: Request, captured: Captured) -> dict[str, Cost]:
    """Seconds by a datasheet's rates, so that plans are the same each time, and measured workspaces."""
    _measured.update(measured_costs(request, captured, captured.device, known=_measured, timed=False)[0])
    seconds = roofline(captured, DEVICES["cpu" if captured.device.type == "cpu" else "h100"])
    return {key: Cost(cost.seconds, _measured[key].workspace_bytes) for key, cost in seconds.items()}


def plan_of(case: Case, captured: Captured, costs: dict[str, Cost]) -> tuple[Schedule, int]:
    """The schedule for a case's budget, and the bytes of plain PyTorch's peak."""
    program = captured.program
    plain_bytes = plain_report(captured.plain, costs, 0, autograd_nodes=captured.autograd_nodes).peak_bytes
    if case.budget == "random":
        rng = Random(case.seed)
        return random_schedule(
            program, case.seed, drop=rng.choice((0.2, 0.5, 0.9)), others=rng.choice((0.0, 0.5))
        ), plain_bytes
    smallest = smallest_known(Instance(program, costs), evaluations=EVALUATIONS)
    assert smallest is not None, "the search found no schedule at all"
    if case.budget == "smallest":
        return smallest.schedule, plain_bytes
    share = 1.0 if case.budget == "plain" else float(case.budget.rstrip("%")) / 100
    found = find_start(Instance(program, costs), int(share * plain_bytes), evaluations=EVALUATIONS)
    return found or smallest.schedule, plain_bytes


# Memory


def peak_of(case: Case, model: nn.Module) -> int:
    """Bytes that one step takes at most, with what exists before it and without the loss and its gradient."""
    model.zero_grad(set_to_none=True)
    example, device = case.inputs(0), torch.device(case.device)
    have_workspaces(device)
    loss_bytes = 2 * TensorMeta.of(torch.zeros((), device=device)).storage_bytes

    def step() -> None:
        with _autocast(case):
            result = _call(model, example)
        trained = {id(t): t for t in _results(result) if t.requires_grad}
        unsaved_loss([*trained.values()], torch.Tensor.zero_).backward()

    return resident_bytes(model, example) + allocated_peak(step, device) - loss_bytes


# Training


def train(case: Case, model: nn.Module) -> dict[str, Any]:
    """Three steps as the case's trainer does them, and everything that could be noticed, by name."""
    left: dict[str, Any] = {}
    between = model.between
    optimizer = _optimizer(model)
    if case.behaviour == "optimizer_in_backward":
        _step_in_backward(model)
    torch.manual_seed(case.seed + 1)
    for step in range(STEPS):
        between(model, step)
        _step(case, model, step, left)
        for name, parameter in model.named_parameters():
            left[f"step {step}: gradient of {name}"] = _copied(parameter.grad)
        if case.behaviour != "optimizer_in_backward":
            optimizer.step()
            if case.behaviour != "accumulate" or step % 2:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        for name, parameter in model.named_parameters():
            left[f"step {step}: parameter {name}"] = _copied(parameter)
        for name, buffer in model.named_buffers():
            left[f"step {step}: buffer {name}"] = _copied(buffer)
        left[f"step {step}: generator"] = get_rng_state(case.device)
        if case.behaviour == "deepcopy" and step == 0:
            model = copy.deepcopy(model)
            optimizer = _optimizer(model)
        if case.behaviour == "eval_between":
            model.eval()
            with torch.no_grad(), _autocast(case):
                _note_outputs(left, f"step {step}: evaluated", _call(model, case.inputs(step + 50)))
            model.train()
    return left


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.01)


def _step_in_backward(model: nn.Module) -> None:
    """Every parameter is updated, and its gradient freed, as soon as the gradient is there."""

    def update(parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # a schedule calls hooks where no gradient arrives, too
            return
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    for parameter in {id(p): p for p in model.parameters() if p.requires_grad}.values():
        parameter.register_post_accumulate_grad_hook(update)


def _step(case: Case, model: nn.Module, step: int, left: dict[str, Any]) -> None:
    behaviour = case.behaviour
    given = case.inputs(step, fewer=int(behaviour == "fewer_samples" and step == 1))
    several = behaviour in ("two_forwards", "two_backwards", "accumulate")
    others = [case.inputs(step + 10)] if several else []
    losses = []
    for number, example in enumerate((given, *others)):
        with _autocast(case):
            result = _call(model, example)
        _note_outputs(left, f"step {step}: {number}", result)
        losses.append(_loss(case, result))
        if behaviour == "accumulate":
            losses.pop().backward()
    if behaviour == "two_forwards":
        torch.stack(losses).sum().backward()
    elif behaviour == "two_backwards":
        for loss in reversed(losses):
            loss.backward()
    elif behaviour == "retain_graph":
        losses[0].backward(retain_graph=True)
        losses[0].backward()
    elif behaviour == "autograd_grad":
        wanted = {id(p): p for p in (*model.parameters(), *_tensors(given)) if p.requires_grad}
        for number, gradient in enumerate(torch.autograd.grad(losses[0], [*wanted.values()], allow_unused=True)):
            left[f"step {step}: gradient of number {number}"] = _copied(gradient)
    elif behaviour != "accumulate":
        losses[0].backward()
    for number, tensor in enumerate(_tensors((given, others))):
        left[f"step {step}: gradient of input {number}"] = _copied(tensor.grad)
        left[f"step {step}: input {number}"] = _copied(tensor)


def _call(model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    return model(*example[0], **example[1])


def _loss(case: Case, result: Any) -> torch.Tensor:
    """A number that depends on every result that the case does not leave out, each element with a weight of its own.

    Elementwise, so that gradients come in the layout of the results, as a schedule takes them; and each result is used
    once: where a loss uses it twice, its gradients are added up before those of its uses within the model.
    """
    ignored = case.ops[-1].arguments.get("ignored", ())
    losses = []
    for number, tensor in enumerate(_results(result)):
        if number not in ignored and tensor.requires_grad and tensor.is_floating_point():
            weights = torch.empty_like(tensor, dtype=torch.float64)
            weights.copy_(torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64).view(tensor.shape))
            wide = tensor.double()
            losses.append((weights * (wide + 0.5 * wide.square())).mean())
    return torch.stack(losses).sum()


def _note_outputs(left: dict[str, Any], name: str, result: Any) -> None:
    left[f"{name} result"] = _structure(result)
    for number, tensor in enumerate(_results(result)):
        left[f"{name} output {number}"] = _copied(tensor)


def _structure(result: Any) -> str:
    """How a result is nested, and what in it is no tensor."""
    if isinstance(result, torch.Tensor):
        return f"{result.dtype}{list(result.shape)}{result.requires_grad}"
    if hasattr(result, "__dataclass_fields__"):
        return f"{type(result).__name__}({[_structure(v) for v in vars(result).values()]})"
    if isinstance(result, dict):
        return f"{type(result).__name__}({[(k, _structure(v)) for k, v in result.items()]})"
    if isinstance(result, list | tuple):
        return f"{type(result).__name__}({[_structure(v) for v in result]})"
    return repr(result)


def _results(result: Any) -> list[torch.Tensor]:
    if hasattr(result, "__dataclass_fields__"):
        result = vars(result)
    return _tensors(result)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _autocast(case: Case) -> AbstractContextManager[None]:
    return autocast_as(case.autocast, torch.device(case.device))


# Comparison

#: Known ends of bit-equality (docs/limits.md), by what a case has that meets one.
_ENDS: dict[str, Callable[[Case], bool]] = {
    "two calls before one backward": lambda case: case.behaviour == "two_forwards",
    "an incoming gradient or an image in another layout": lambda case: any(
        op.arguments.get("layout", "plain") != "plain" or op.kind in ("view", "rearranged", "parts") for op in case.ops
    ),
}


def known_end(case: Case, verdict: Verdict) -> str:
    """Which known end of bit-equality explains a verdict; "" if none does. A difference must be one of rounding."""
    off_by = re.search(r"off by (\S+)$", verdict.detail)
    allowed = 16 * torch.finfo(getattr(torch, case.autocast or case.dtype)).eps
    if verdict.status != "wrong" or off_by is None or float(off_by[1]) > allowed:
        return ""
    return next((end for end, meets in _ENDS.items() if meets(case)), "")


def difference(case: Case, plain: dict[str, Any], ours: dict[str, Any], rounding: float | None = None) -> str:
    """The first difference between what two trainings left; "" where there is none.

    ``conv`` in a mode allows for rounding; everything else is equal to the bit.
    """
    if rounding is None:
        rounding = ROUNDING[case.dtype] if "conv" in case.mode.split("_") else 0.0
    largest: dict[str, float] = {}
    for name, one in plain.items():
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel():
            largest[_group(name)] = max(largest.get(_group(name), 0.0), float(one.abs().nan_to_num(0, 0, 0).max()))
    for name, one in plain.items():
        other = ours.get(name, "nothing")
        if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
            return f"{name}: {_brief(other)} instead of {_brief(one)}"
        if not isinstance(one, torch.Tensor):
            if one != other:
                return f"{name}: {other} instead of {one}"
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{name}: {_brief(other)} instead of {_brief(one)}"
        if not torch.equal(one, other) and not _same_with_nan(one, other):
            if not one.is_floating_point():
                return f"{name}: other numbers"
            size = one.double().nan_to_num()
            error = float((size - other.double().nan_to_num()).abs().max())
            allowed = rounding * largest[_group(name)]
            if rounding:  # what is left where terms cancel
                allowed = max(allowed, 64 * torch.finfo(one.dtype).eps * max(largest.values()))
            if not error <= allowed:
                return f"{name}: off by {error / max(float(size.abs().max()), 1e-300):.1e}"
    return ""


def _same_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.is_floating_point()
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _group(name: str) -> str:
    """Tensors whose sizes can be compared: gradients of one step with each other, and so on."""
    return " ".join(name.split(" ")[:3])


def _brief(thing: Any) -> str:
    return f"{thing.dtype}{list(thing.shape)}" if isinstance(thing, torch.Tensor) else str(thing)
