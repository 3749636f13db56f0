"""`ScheduleWrapper`: a model that trains by a schedule. During training nothing is measured or planned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..capture.captured import Captured
from ..capture.checks import check_initialized, check_unscripted
from ..capture.example_inputs import device_of, example_of
from ..capture.precision import AUTOCASTS, autocast_as
from ..capture.quantised import settle
from ..capture.trace.alone import CallLock
from ..capture.trace.joint import asks_for_values
from ..capture.trees import flattened
from ..errors import CaptureError, ScheduleFileError, UsageError
from ..inductor.compiled_call import check_inductor
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from ..nn.sync_batch_norm import is_synchronised
from ..profile.devices import known_limits, machine_at
from ..runtime.streamed_block import Streamed
from .checks.compatibility import check_shapes, told_of_order, warn_elsewhere
from .graphs.model import ModelGraphs
from .kept_steps import KeptSteps
from .memory.arena import Arena
from .stepping import Stepping

#: How calls run: one operator after the other as PyTorch calls them, or as graphs that TorchInductor compiles.
BACKENDS = ("eager", "inductor")


class ScheduleWrapper(Stepping):
    """A model whose training step follows a schedule.

    It has the model's own parameters, buffers, submodules and ``state_dict``. In training mode with gradients
    enabled a call runs the schedule; ``eval()`` and ``no_grad`` run the model as it is. Gradients, buffers and
    random masks are those of the plain model. Hooks on submodules do not fire while a schedule runs. A call that the
    schedule is not for is an error before the first step; later it runs as the plain model, with one warning.

    Args:
        model: the model the schedule was solved for; it is shared, not copied.
        solution_file: a schedule file, a loaded `ScheduleRecord`, or a schedule of the zoo: ``zoo:resnet50_184_10.00``
            is the one for the device that the model is on, ``zoo:resnet50_184_10.00@h100`` that for a H100.
        input_shape: shape of the input, with or without the batch; a list of shapes for several inputs. It must be the
            shape that the schedule was solved for. None takes the file's word. Calls may have smaller inputs: a last
            batch, shorter sequences. They are captured once for each shape and follow the same decisions.
        example: arguments to capture the model with, as (args, kwargs); default: fake ones of the file's shapes.
        captured: the model as captured with ``example`` and the schedule's mode, if that is at hand: it takes seconds.
        backend: ``eager``, or ``inductor``: the model is compiled as one graph, planned for the budget of the schedule
            (minutes, once); where that fails, it follows the schedule, with a warning. Results agree to rounding,
            random masks are the same. Smaller inputs are replayed by ``eager``.
        cuda_graphs: whether training steps on a GPU are replayed as CUDA graphs (docs/faq.md, CUDA graphs). None:
            where the host is waited for, the memory suffices, and a trial at the third step is won. True: without a
            trial, and a warning says which steps cannot be. Gradients, buffers and random masks do not change.

    Raises:
        UsageError: an unknown backend, or one that lacks its compiler.
        ScheduleFileError: the file is unreadable or was made for another model, shape or version.
        CaptureError: the model cannot be captured.
    """

    #: Attributes of the wrapper itself; all others are the model's.
    _OWN = frozenset({"backend", "record", "training"})
    #: Private names that libraries give a model for its own forward.
    _OF_MODEL = frozenset({"_gradient_checkpointing_func"})
    #: Whether one step is all that its tensors' places depend on; not so for one of many blocks.
    plans_its_memory = True

    def __init__(
        self,
        model: nn.Module,
        solution_file: str | Path | ScheduleRecord,
        input_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        captured: Captured | None = None,
        backend: str = "eager",
        cuda_graphs: bool | None = None,
    ) -> None:
        super().__init__()
        check_unscripted(model)
        self._share(model, backend, cuda_graphs)
        self.record = record = _loaded(solution_file, device_of(model))
        if input_shape is not None:
            check_shapes(record, input_shape)
        inputs = len(record.inputs) if example is None else 0
        if example is None:
            example = example_of(record.inputs, device_of(model))
        device = device_of(model, example)
        warn_elsewhere(record, device, stacklevel=2)
        if model.training:
            args, kwargs = example
            kwargs = self._without_cache(args, kwargs)
            leaves, spec = flattened((args, kwargs))
            if record.autocast not in AUTOCASTS:
                raise ScheduleFileError(
                    f"the schedule's autocast is {record.autocast!r}, which this version does not know"
                )
            with autocast_as(record.autocast, device), told_of_order(inputs):
                try:
                    self._new_step(self._key(leaves, spec), args, kwargs, captured)
                except (CaptureError, ScheduleFileError):
                    if not inputs or not asks_for_values(model):
                        raise  # else the first call, which has values, is captured

    def _share(self, model: nn.Module, backend: str, cuda_graphs: bool | None = False) -> None:
        """Share the parameters, buffers and submodules of ``model``."""
        if isinstance(model, ScheduleWrapper):
            raise UsageError("the model is already wrapped in a ScheduleWrapper")
        check_initialized(model)
        settle(model)
        if backend not in BACKENDS:
            raise UsageError(f"backend {backend!r} is unknown; give {' or '.join(BACKENDS)}")
        if backend == "inductor":
            check_inductor(device_of(model))
        self.__dict__["_model"] = model
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training, self.backend = model.training, backend
        self._kept = KeptSteps()
        self._lock = CallLock()  # of captures in several threads, each of which changes the model while it lasts
        self._begun = False  # whether a step was run, or planned ahead
        self._arena: Arena | None = None  # see `monet_like.place_memory`
        self._graphs = ModelGraphs(bool(cuda_graphs)) if cuda_graphs or cuda_graphs is None else None
        self._synchronised = is_synchronised(model)
        self._streamed: Streamed | None = None  # see `monet_like.runtime.streamed_weights`

    def train(self, mode: bool = True) -> ScheduleWrapper:
        """Switch the model and this wrapper together."""
        self._model.train(mode)
        self.training = mode
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        if not self._is_own(name) or (name == "training" and "_model" in self.__dict__):
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute belongs to the wrapper and not to the model.

        Private names that the model does not have are the wrapper's too: libraries keep notes there, such as the
        forward that they have replaced.
        """
        model = self.__dict__.get("_model")
        if model is None or name in self.__dict__ or hasattr(type(self), name) or name in type(self)._OWN:
            return True
        return name.startswith("_") and name not in self._OF_MODEL and not hasattr(model, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_model"], name)

    def __getstate__(self) -> dict[str, Any]:
        # Steps are compiled anew where it is unpickled or copied, and no memory is shared.
        return {**super().__getstate__(), "_arena": None}

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        record = self.record
        peaks = f"peak {format_bytes(record.peak_bytes)}, plain PyTorch's {format_bytes(record.plain_peak_bytes)}"
        step = f"step {format_seconds(record.seconds)}, plain PyTorch's {format_seconds(record.plain_seconds)}"
        return f"schedule: budget {format_bytes(record.budget_bytes)}, {peaks}, {step}, {record.mode}, {self.backend}"


def _loaded(solution: str | Path | ScheduleRecord, device: torch.device) -> ScheduleRecord:
    """Load a schedule record from a file or from the zoo."""
    if isinstance(solution, ScheduleRecord):
        return solution
    if str(solution).startswith("zoo:"):
        from ..zoo.download import find_record

        limits = known_limits(machine_at(device).name)
        return find_record(str(solution), device=device.type, near=limits.name if limits else "")
    return ScheduleRecord.load(Path(solution))
