"""The forward of a module, compiled by TorchInductor with a step that stays within given bytes.

The module's own forward is compiled, as ``torch.compile`` does it, and not a schedule: Inductor's joint graph of
forward and backward is planned within these bytes (`monet_like.inductor.partitioner`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._guards import TracingContext

from ..capture.captured import look_of
from ..capture.resident import parts_of
from ..capture.trees import tensors_of
from ..errors import MonetError, UsageError
from ..runtime.offloaded_calls import KeepingSaved, OffloadedCalls, hooks_are_free
from .options import missing_hook, options_of
from .partitioner import MenuReader
from .planned_graph import PlannedGraph, Settings

#: Options with which random numbers are drawn by PyTorch's own operators; and without CUDA graphs, whose copies no plan
#: of a step counts.
_OPTIONS = {"fallback_random": True, "triton.cudagraphs": False}


class NotCompiled(Exception):
    """A call that cannot be compiled; nothing of it has run. The text says why."""


class CompiledCall:
    """Runs modules that are alike, each call as one compiled graph; it holds none of them.

    Masks are plain PyTorch's: random numbers are drawn by PyTorch's own operators, in the order of the forward.

    Args:
        settings: how graphs are planned.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self._failed = settings, ""
        self.options = {**options_of(settings), **_OPTIONS}
        self._run = _compiling(self.options)

    @property
    def graphs(self) -> Sequence[PlannedGraph]:
        """The plans so far."""
        found: list[PlannedGraph] = self.options["custom_partitioner_fn"].graphs
        return found

    def __call__(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], calls: OffloadedCalls | None = None
    ) -> Any:
        """The module's result, whose backward is compiled, too.

        Args:
            calls: of the model's blocks, some of which offload what they keep.

        Raises:
            NotCompiled: the call cannot be compiled, or not within the bytes.
        """
        if self._failed:
            raise NotCompiled(self._failed)
        try:
            if calls is None or not hooks_are_free():
                return self._run(module, args, kwargs)
            return self._offloading(calls, module, args, kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError, MonetError) as error:
            self._failed = _reason(error)
            raise NotCompiled(self._failed) from error

    def _offloading(
        self, calls: OffloadedCalls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """As `__call__`; what the limits let wait on the host leaves."""
        limits = self.settings.limits
        keeping = KeepingSaved(calls, limits.offloaded_bytes if limits else 0)
        with keeping.saving():
            result = self._run(module, args, kwargs)
        given, looks = tensors_of((args, kwargs)), limits.lone if limits else ()
        others = (tensor for tensor in given if look_of(tensor) not in looks)
        held = chain(module.parameters(), module.buffers(), tensors_of(result), others)
        lone = [tensor for tensor in given if look_of(tensor) in looks]
        keeping.ended(lone, chain.from_iterable(map(parts_of, held)))
        return result

    def __reduce__(self) -> Any:
        return CompiledCall, (self.settings,)


def _whole() -> AbstractContextManager[Any]:
    """Within it Dynamo does not cut a graph along the buckets of a DistributedDataParallel around it."""
    if dist.is_available() and dist.is_initialized():
        whole: AbstractContextManager[Any] = torch._dynamo.config.patch(optimize_ddp=False)
        return whole
    return nullcontext()


def menu_for(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings
) -> tuple[PlannedGraph, ...]:
    """The ways to run a call of a module as one compiled graph; nothing is compiled, and nothing runs.

    Raises:
        NotCompiled: there is none.
    """
    reader = MenuReader(settings)
    options = {**options_of(settings), **_OPTIONS, "custom_partitioner_fn": reader}
    try:
        _compiling(options)(module, args, kwargs)
    except Exception as error:
        if reader.found is None:
            raise NotCompiled(_reason(error)) from error
    if reader.found is None:
        raise NotCompiled("Inductor asks for no partition of it")
    return reader.found


def _compiling(options: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of a module, its arguments and its keyword arguments, compiled as one graph with these options.

    What is saved for the backward stays as it is, so that another backward can read it.
    """

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(donated_buffer=False):
            return compile_fx(graph, list(inputs), inner_compile=_without_donations, config_patches=dict(options))

    def call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return module(*args, **kwargs)

    # Dynamo keeps what it has compiled with the code, and of one code a few results only.
    call.__code__ = call.__code__.replace(co_name=f"call_{id(call):x}")
    compiled = torch.compile(call, backend=backend, dynamic=False, fullgraph=True)

    def run(*given: Any) -> Any:
        with _whole():
            return compiled(*given)

    return run


def _without_donations(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile a graph, of which AOTAutograd is told that it writes into nothing that is saved.

    Otherwise it refuses a second backward by its setting at that time, in which buffers are donated.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
    return compile_fx_inner(module, inputs, **options)


def _reason(error: BaseException) -> str:
    """Why a call was not compiled, in one line: our own error, if it is among the causes."""
    own = next((cause for cause in _causes(error) if isinstance(cause, MonetError)), error)
    return str(own).strip().partition("\n")[0]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def check_inductor(device: torch.device) -> None:
    """Whether Inductor can compile for ``device``.

    Raises:
        UsageError: something is missing: a C++ compiler for the CPU, Triton for a GPU, or a hook of Inductor.
    """
    if missing := missing_hook():
        raise UsageError(
            f"backend 'inductor' needs torch._inductor.config.{missing}, which PyTorch {torch.__version__} lacks; "
            "install a release that monet_like is tested with, or use backend='eager'"
        )
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UsageError(
                f"backend 'inductor' needs Triton for {device.type}, which PyTorch does not find; "
                "install triton, or use backend='eager'"
            )
        return
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        tried = ", ".join(filter(None, config.cpp.cxx)) or "none"
        raise UsageError(
            f"backend 'inductor' needs a C++ compiler, and none runs here (tried: {tried}); "
            "install g++, name another in the environment variable CXX, or use backend='eager'"
        ) from None
