"""PyTorch's own databases of operators and modules, each sample as a training step, against plain PyTorch:

    python -m benchmarks.operator_database ops --shard 0/4 --samples 2 --out FILE

A sample of an operator is a small model: the inputs that want gradients, times a parameter; the operator; and the sine
of its results. The databases are PyTorch's tests' (``torch.testing._internal``) and need ``expecttest`` and
``hypothesis``.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import torch
import torch.utils._pytree as pytree
from torch import nn

from .verdicts import (
    INVALID,
    NO_GRADIENT,
    RANDOM,
    REFUSED,
    RIGHT,
    WRONG,
    Verdict,
    judged,
    out_option,
    refusal,
    report,
    same,
    shard_option,
)

#: Kinds of tests that are asked for, and their dtypes.
DATABASES = ("ops", "modules")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
#: All variants that are exact.
MODE = "inplace_multiway_newnode"
#: Shares of plain PyTorch's peak; the first one that has a plan is taken.
BUDGETS = ("85%", "100%", "130%")
SECONDS = 60


@dataclass(frozen=True)
class Sample:
    """A sample of a database.

    Attributes:
        name: of the operator or module, with the sample's number.
        build: makes the model, its arguments and its keyword arguments.
    """

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


class Applied(nn.Module):
    """An operator on tensors of which those that want gradients are multiplied by a parameter.

    Args:
        function: the operator.
        leaves, spec: its flattened arguments; None in the places of tensors.
        places: of the tensors.
    """

    def __init__(
        self, function: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec, places: list[int]
    ) -> None:
        super().__init__()
        self.function, self.leaves, self.spec, self.places = function, leaves, spec, places
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = scaled(tensor, self.scale)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(
            torch.sin(result) if result.is_floating_point() and result.layout is torch.strided else result
            for result in tensors_in(self.function(*args, **kwargs))
        )


class Contained(nn.Module):
    """A module on arguments of which those that want gradients are multiplied by a parameter; its results
    are a tuple.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.scale = module, nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        given = [scaled(arg, self.scale) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return tuple(tensors_in(self.module(*given, **kwargs)))


def scaled(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The tensor times the parameter, where it wants a gradient."""
    return tensor * scale.to(tensor.dtype) if tensor.requires_grad else tensor


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def operators(
    samples: int, device: str, dtype: torch.dtype, *, part: int = 0, parts: int = 1, only: str = ""
) -> Iterator[Sample]:
    """Samples of the operators that have gradients, and of their forms in place.

    Args:
        samples: of each operator at most.
        part, parts: which operators: this one and each that is ``parts`` further.
        only: a part of their names.
    """
    database = _imported("common_methods_invocations")
    # The samples of random operators set a seed in every call, which no model does.
    database.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    for operator in [known for known in database.op_db if only in known.name][part::parts]:
        if not operator.supports_autograd or dtype not in operator.supported_backward_dtypes(torch.device(device).type):
            continue
        torch.manual_seed(0)
        try:
            made = list(operator.sample_inputs(device, dtype, requires_grad=True))
        except Exception:  # the database has no samples for this dtype or device
            continue
        usable = [sample for sample in made if isinstance(sample.input, torch.Tensor | list | tuple)]
        name = ".".join(filter(None, (operator.name, operator.variant_test_name)))
        for number, sample in enumerate(usable[:: max(1, len(usable) // samples)][:samples]):
            arguments = ((sample.input, *sample.args), sample.kwargs)
            yield Sample(f"{name} {number}", _builder(operator.op, arguments, device))
            if operator.inplace_variant is not None and number == 0:
                yield Sample(f"{name}_ {number}", _builder(_on_clone(operator.inplace_variant), arguments, device))


def _imported(name: str) -> Any:
    """A module of PyTorch's tests.

    Importing one forbids to set flags such as ``torch.backends.cudnn.deterministic``.
    """
    module = importlib.import_module(f"torch.testing._internal.{name}")
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return module


def _builder(function: Callable[..., Any], arguments: Any, device: str) -> Callable[[], Any]:
    def build() -> Any:
        leaves, spec = pytree.tree_flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = tuple(leaves[place].detach().clone().requires_grad_(leaves[place].requires_grad) for place in places)
        others = [None if place in places else leaf for place, leaf in enumerate(leaves)]
        return Applied(function, others, spec, places).to(device), tensors, {}

    return build


def _on_clone(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, *args, **kwargs: function(first.clone(), *args, **kwargs)


def modules(
    samples: int, device: str, dtype: torch.dtype, *, part: int = 0, parts: int = 1, only: str = ""
) -> Iterator[Sample]:
    """Samples of PyTorch's modules in training mode; arguments as of `operators`."""
    for entry in [known for known in _imported("common_modules").module_db if only in known.name][part::parts]:
        try:
            made = list(entry.module_inputs_func(entry, device=device, dtype=dtype, requires_grad=True, training=True))
        except Exception:  # the database has no samples for this dtype or device
            continue
        for number, sample in enumerate(made[:: max(1, len(made) // samples)][:samples]):
            yield Sample(f"{entry.name} {number}", _module_builder(entry.module_cls, sample, device, dtype))


def _module_builder(kind: Any, sample: Any, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        module = kind(*sample.constructor_input.args, **sample.constructor_input.kwargs).train()
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters()):  # the first call makes them
            module.to(device)(*args, **kwargs)
        return Contained(module.to(device, dtype)).to(device), args, kwargs

    return build


@dataclass(frozen=True)
class Outcome:
    """What a step leaves: results, gradients, buffers, and the state of the generator."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    generator: torch.Tensor

    def differences(self, other: Outcome) -> list[str]:
        """The names of what is not equal to the bit."""
        found = []
        for name in ("results", "gradients", "buffers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if len(mine) != len(theirs):
                found.append(f"number of {name}")
            found += [
                f"{name[:-1]} {place}" for place, pair in enumerate(zip(mine, theirs, strict=False)) if not same(*pair)
            ]
        return found + ["generator"] * (not torch.equal(self.generator, other.generator))


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """One step from a fixed seed; each element of a result has another gradient, in rows."""
    copies: dict[int, Any] = {}

    def fresh(leaf: Any) -> Any:  # that lies in memory as before; a tensor that is given twice is still one
        if isinstance(leaf, torch.Tensor) and id(leaf) not in copies:
            copied = copy.deepcopy(leaf.detach()) if leaf.layout is torch.strided else leaf.detach().clone()
            copies[id(leaf)] = copied.requires_grad_(leaf.requires_grad)
        return copies.get(id(leaf), leaf)

    args, kwargs = pytree.tree_map(fresh, (args, kwargs))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    results = tensors_in(model(*args, **kwargs))
    loss: Any = 0.0
    for result in results:
        if result.requires_grad:
            dense = result.to_dense() if result.layout is not torch.strided else result
            numbers = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            slope = (
                torch.arange(numbers.numel(), dtype=numbers.dtype, device=numbers.device).reshape(numbers.shape).cos()
            )
            loss = loss + (numbers.nan_to_num() * slope).sum().double()
    if isinstance(loss, torch.Tensor):
        loss.backward()
    of_cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return Outcome(
        [result.detach().clone() for result in results],
        [tensor.grad for tensor in (*tensors_in((args, kwargs)), *model.parameters())],
        [buffer.clone() for buffer in model.buffers()],
        torch.cat([torch.get_rng_state(), *of_cuda]),
    )


def judge(sample: Sample) -> Verdict:
    """Train a sample by a plan and compare two steps with plain PyTorch's."""
    return judged(sample.name, lambda: _judged(sample), SECONDS)


def _judged(sample: Sample) -> tuple[str, object]:
    import monet_like
    from monet_like.errors import InfeasibleError, MonetError

    try:
        plain, again = ([step(*built) for _ in range(2)] for built in (sample.build(), sample.build()))
    except Exception as error:  # whatever PyTorch's operators raise
        return INVALID, error
    if found := plain[1].differences(again[1]):
        return RANDOM, found
    if all(gradient is None for gradient in plain[0].gradients):
        return NO_GRADIENT, ""
    model, args, kwargs = sample.build()
    options: dict[str, Any] = {"mode": MODE, "effort": "quick", "on_new_input": "error", "verbose": False}
    for share in BUDGETS:
        try:
            planned = monet_like.auto_schedule(model, args, kwargs=kwargs or None, memory_budget=share, **options)
            break
        except InfeasibleError as error:
            unfit = error
        except MonetError as error:
            return refusal(error)
    else:
        return REFUSED, unfit
    for expected in plain:
        try:
            got = step(planned, args, kwargs)
        except MonetError as error:
            return refusal(error)
        if found := expected.differences(got):
            return WRONG, found
    return RIGHT, ""


@click.command()
@click.argument("database", type=click.Choice(DATABASES))
@shard_option
@click.option("--samples", default=2, show_default=True, help="Of each operator or module, at most.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(list(DTYPES)))
@click.option("--only", default="", help="Names that contain this.")
@out_option
def main(
    database: str, shard: tuple[int, int], samples: int, device: str, dtype: str, only: str, out: Path | None
) -> None:
    """Train the samples of a database by plans; exit code 1 if one is wrong or crashed."""
    part, parts = shard
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    source = operators if database == "ops" else modules
    found = source(samples, device, DTYPES[dtype], part=part, parts=parts, only=only)
    report(map(judge, found), f"samples of {database} on {device} in {dtype}", out)


if __name__ == "__main__":
    main()
