"""Checks of a model before it is traced: lazy, sharded or meta-device parameters, batch norms without momentum, inputs
of classes with rules of their own, hooks on all modules."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CaptureError, UsageError
from .guards.settings import hooks_on_all_modules

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, FakeTensor)
#: Libraries whose classes of tensors say what an image is, and compute as plain tensors do.
_OF_LABELS = frozenset({"torchvision", "fastai", "monai"})


def check_initialized(model: nn.Module, *, planned: bool = False) -> None:
    """Refuse a model whose parameters or buffers have no shapes yet, or no memory.

    Args:
        planned: for a device that is not here: no memory is needed.

    Raises:
        UsageError: a lazy module has not seen an input yet, or a tensor is on the meta device.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not planned and not is_lazy(tensor) and tensor.is_meta:
            raise UsageError(
                f"{name} of {type(model).__name__} is on the meta device, where tensors have no values; build the "
                "model on the device that it will train on, or call model.to_empty(device=...) and load its weights; "
                "to plan it as it is, name a GPU that is not here (roofline:h100)"
            )
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise UsageError(
                f"{name or type(model).__name__} is a lazy module whose parameters have no shapes yet; call the model "
                "once on an example first"
            )


class Scripted(CaptureError, UsageError):
    """A model has a part in TorchScript, and the module that it was made from may be given instead."""


def check_unscripted(model: nn.Module, name: str = "") -> None:
    """Refuse a model, or a block of this name, that has parts in TorchScript.

    Raises:
        Scripted: a module was scripted or traced.
    """
    for path, module in model.named_modules(prefix=name):
        if isinstance(module, torch.jit.ScriptModule):
            raise Scripted(
                f"{path or 'the model'} is in TorchScript (torch.jit.script, trace or load), whose layers cannot be "
                "captured; give the module that it was made from, or leave it as it is and give schedules to other "
                "parts of the model: monet_like.auto_schedule(model, blocks=...)"
            )


def check_unflattened(model: nn.Module) -> None:
    """Refuse to plan blocks of a model within a step of ``FullyShardedDataParallel`` around it, whose state forbids
    other steps meanwhile, as rehearsals are.

    Raises:
        UsageError: its parameters are parts of one that a module around it has.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    inside = {module for unit in units for module in unit.modules()}
    for name, module in model.named_modules():
        if module in inside:
            continue
        held = [*module._parameters.values(), *vars(module).values()]
        tensors = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
        if any(hasattr(whole, "_fsdp_flattened") for tensor in tensors for whole in (tensor, tensor._base)):
            raise UsageError(
                f"FullyShardedDataParallel (FSDP1) holds parameters of {name or type(model).__name__}, and blocks "
                "cannot be planned there; take fully_shard (FSDP2; Accelerate's fsdp_version: 2), after "
                "auto_schedule(model, blocks=...)"
            )


def check_unsharded(model: nn.Module) -> None:
    """Refuse a model with sharded parameters: a schedule holds only one process's own operators.

    Raises:
        CaptureError: a module has them.
    """
    from_fsdp = any(map(is_sharded, model.modules()))
    for name, module in model.named_modules():
        who, parameters = name or type(model).__name__, [p for p in module._parameters.values() if p is not None]
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            raise CaptureError(
                f"{who} has parameters that DeepSpeed's ZeRO stage 3 gathers while the step runs, outside of a "
                "schedule; take stage 1 or 2, or fully_shard (FSDP2) with auto_schedule(model, blocks=...)"
            )
        if any(hasattr(parameter, "device_mesh") for parameter in parameters):
            raise CaptureError(
                f"{who} has sharded parameters, which are gathered while the step runs; shard around it: "
                "fully_shard(ScheduleWrapper(model, ...)), or auto_schedule(model, blocks=...) and then fully_shard"
                if from_fsdp
                else f"{who} has parameters that are split among processes (DTensor, tensor parallelism), and a "
                "schedule holds only one process's own operators; plan the parts that are not split, "
                "auto_schedule(model, blocks=[...]), or shard by fully_shard"
            )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this module."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def check_momentum(model: nn.Module) -> None:
    """Refuse a batch norm with ``momentum=None``, whose averaging factor depends on the number of earlier steps.

    Raises:
        CaptureError: the model is training and has one.
    """
    for name, module in model.named_modules():
        averaging = isinstance(module, _BATCH_NORMS) and module.training and module.track_running_stats
        if averaging and module.momentum is None:
            raise CaptureError(
                f"{name or type(model).__name__} has momentum=None, so its average depends on how many steps there "
                "were; give it a number, such as momentum=0.1"
            )


def check_surroundings(model: nn.Module) -> None:
    """Refuse what would be part of a trace, or of each call, and not of the other: hooks on all modules, cached
    weights.

    Raises:
        CaptureError: there are such.
    """
    if hooks := hooks_on_all_modules():
        raise CaptureError(
            f"a hook on all modules is registered ({getattr(hooks[0], '__qualname__', hooks[0])}), and in a schedule "
            f"modules do not run one by one; register it on the modules of {type(model).__name__}, or remove it while "
            "schedules run"
        )
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, model.modules())):
        raise CaptureError(
            f"{type(model).__name__} was called inside parametrize.cached(), whose tensors a trace cannot take; a "
            "schedule computes weights that have parametrizations once for each use: call it outside"
        )


def acts_as_plain(tensor: torch.Tensor) -> bool:
    """Whether operators compute with a tensor as with one of class ``torch.Tensor``."""
    kind = type(tensor)
    if kind in _PLAIN_TYPES or kind.__module__.partition(".")[0] in _OF_LABELS:
        return True
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    functions = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]
    return function in functions and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def may_have_gradient(tensor: torch.Tensor) -> bool:
    """Whether it matters that a tensor is given as several inputs: its gradient is the sum of theirs.

    Token ids have none.
    """
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def attributes_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """The names of the Python attributes that somebody has set on a tensor."""
    return () if isinstance(tensor, FakeTensor) else tuple(sorted(vars(tensor)))


def check_arguments(model: nn.Module, arguments: Iterable[Any]) -> None:
    """Refuse inputs whose class decides what operators compute, nested and sparse ones: a schedule computes with plain
    tensors.

    Raises:
        CaptureError: there is one. Tensors that consist of others, such as quantised ones, have an error of their own.
    """
    for leaf in arguments:
        if isinstance(leaf, torch.Tensor) and not acts_as_plain(leaf) and not is_traceable_wrapper_subclass(leaf):
            raise CaptureError(
                f"an input of {type(model).__name__} is a {type(leaf).__name__}, which decides itself what operators "
                "compute, and a schedule computes with plain tensors; give x.as_subclass(torch.Tensor)"
            )
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise CaptureError(
                f"an input of {type(model).__name__} is a nested tensor, whose parts differ in length, and a schedule "
                "computes with tensors that have one shape; give a padded tensor and a mask, or give the parts of the "
                "model that take no nested tensors schedules of their own (monet_like.auto_schedule(model, blocks=...))"
            )
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise CaptureError(
                f"an input of {type(model).__name__} is of layout {leaf.layout}, and a schedule computes with tensors "
                "that have strides; give x.to_dense(), or give the parts of the model that take no sparse tensors "
                "schedules of their own (monet_like.auto_schedule(model, blocks=...))"
            )


def check_attributes(model: nn.Module, arguments: Iterable[Any], names: Set[str]) -> None:
    """Refuse inputs with Python attributes that the forward may read: its trace is of tensors without any.

    Args:
        names: that occur in the code that ran.

    Raises:
        CaptureError: an input has one of these.
    """
    for leaf in arguments:
        read = [name for name in attributes_of(leaf) if name in names] if isinstance(leaf, torch.Tensor) else []
        if read:
            raise CaptureError(
                f"an input of {type(model).__name__} has the attribute {read[0]}, which its forward reads; give it as "
                "an argument of its own"
            )
