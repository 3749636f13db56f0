"""Registers the operators `torch.ops.monet_like.*`: each has a schema, a plain-torch reference and a fake.

* The schema lists arguments and results.
* The reference, or plain-torch twin, computes on any device what the kernels in csrc/ must compute, with more memory
  and time. It stands in where no kernel is compiled.
* The fake returns an uninitialised result of the right shape, dtype and strides, for tracing with fake tensors.

The modules of this package hold one family of operators each, as the files in csrc/ do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

NAMESPACE = "monet_like"
#: Names of the operators that are compiled for CUDA only, and only where cuDNN's headers are found.
CUDNN = frozenset({"cudnn_convolution", "cudnn_convolution_backward_input", "cudnn_convolution_backward_weight"})

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass
class Operator:
    """One operator of ours.

    Attributes:
        schema: arguments and results in PyTorch's notation, without the name.
        reference: the operator in plain PyTorch.
        cuda: another implementation in plain PyTorch for CUDA, or None: the reference serves there too.
        kernel: another package's implementation, or None.
        runs_on: whether ``kernel`` runs on a kind of device ("cpu" or "cuda") in this process.
        fake: the operator on fake tensors; its parameters are those arguments of the schema that it needs.
    """

    schema: str
    reference: Callable[..., Any]
    cuda: Callable[..., Any] | None = None
    kernel: Callable[..., Any] | None = None
    runs_on: Callable[[str], bool] = lambda _: False
    fake: Callable[..., Any] | None = None

    def implementation(self, device: str) -> Callable[..., Any]:
        """What runs on this kind of device where csrc/ has no kernel."""
        if self.kernel is not None and self.runs_on(device):
            return self.kernel
        return (self.cuda if device == "cuda" else None) or self.reference


#: Operators that csrc/ compiles, by name; filled when the modules of the families are imported.
OPERATORS: dict[str, Operator] = {}
#: Operators that exist in Python only, by name.
PYTHON_OPERATORS: dict[str, Operator] = {}


def operator(schema: str, *, compiled: bool = True) -> Callable[[_Function], _Function]:
    """Register the decorated function as the reference of the operator of the same name.

    Args:
        schema: as `Operator.schema`.
        compiled: whether csrc/ has kernels of the operator.
    """

    def register(reference: _Function) -> _Function:
        (OPERATORS if compiled else PYTHON_OPERATORS)[reference.__name__] = Operator(schema, reference)
        return reference

    return register


def on_cuda(reference: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Register the decorated function as what the operator of this reference runs on CUDA, in plain PyTorch."""

    def register(function: _Function) -> _Function:
        _known(reference).cuda = function
        return function

    return register


def kernel_of(reference: Callable[..., Any], runs_on: Callable[[str], bool]) -> Callable[[_Function], _Function]:
    """Register the decorated function, which calls another package's kernel, for the operator of this reference.

    Args:
        runs_on: as `Operator.runs_on`.
    """

    def register(function: _Function) -> _Function:
        known = _known(reference)
        known.kernel, known.runs_on = function, runs_on
        return function

    return register


def fake(*references: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Register the decorated function as the fake of the operators of these references.

    Its parameters are the arguments that it needs, under their names in the schema.
    """

    def register(function: _Function) -> _Function:
        for reference in references:
            _known(reference).fake = function
        return function

    return register


def _known(reference: Callable[..., Any]) -> Operator:
    return OPERATORS.get(reference.__name__) or PYTHON_OPERATORS[reference.__name__]


def register_fakes(operators: dict[str, Operator], library: torch.library.Library | None = None) -> None:
    """Register the fakes of operators with PyTorch, once per process, after PyTorch knows the operators' schemas."""
    for name, known in operators.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", _with_all_arguments(name, known), lib=library)


def _with_all_arguments(name: str, known: Operator) -> Callable[..., Any]:
    """The operator's fake as a function of all arguments of the schema."""
    assert known.fake is not None, name
    function, wanted = known.fake, list(inspect.signature(known.fake).parameters)
    arguments = torch._C.parse_schema(f"{NAMESPACE}::{name}{known.schema}").arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    assert set(wanted) <= set(names), f"the fake of {name} needs {set(wanted) - set(names)}, which the schema lacks"

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return function(*(given[name] for name in wanted))

    return call
