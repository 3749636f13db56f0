"""The operators `torch.ops.monet_like.*`.

They are packed masks and caches, max pooling with byte offsets, fused batch and RMS norm, convolutions by chosen cuDNN
algorithms, SyncBatchNorm in parts, and Liger's kernels.

Importing this package does nothing. `load()` makes the operators exist: with the kernels of the compiled library where
it is built, else with the plain-torch references of the modules here, under the same names and with the same results.
`python -m monet_like.build` compiles the library.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .registry import Operator

__all__ = ["available", "has", "load", "operators", "python_operators", "runs_here", "status", "twin"]

_lock = threading.Lock()
_compiled: Mapping[str, frozenset[str]] | None = None  # operators with compiled kernels, by device; None until load()
_reason = "not loaded yet"
_keep_alive: list[Any] = []  # torch.library registrations live as long as their Library object

_DEVICES = {"cpu": "CPU", "cuda": "CUDA"}


def operators() -> Mapping[str, Operator]:
    """The operators that csrc/ compiles, by name, with their schemas, references and fakes."""
    # Each registers a family.
    from . import batch_norm, caches, convolution, masks, max_pool, rms_norm, swiglu  # noqa: F401
    from .registry import OPERATORS

    return OPERATORS


def python_operators() -> Mapping[str, Operator]:
    """The operators that exist in Python only, by name; some of them call another package's kernels."""
    from . import gradients_by_values, liger, sync_batch_norm  # noqa: F401
    from .registry import PYTHON_OPERATORS

    return PYTHON_OPERATORS


def load() -> None:
    """Make `torch.ops.monet_like.*` available. Safe to call often, from any thread."""
    global _compiled, _reason
    with _lock:
        if _compiled is not None:
            return
        import torch

        from .registry import NAMESPACE, register_fakes

        ours, in_python = operators(), python_operators()
        library = torch.library.Library(NAMESPACE, "DEF")
        _keep_alive.append(library)
        for name, known in {**ours, **in_python}.items():
            library.define(name + known.schema, tags=(torch.Tag.pt2_compliant_tag,))
        _reason = _load_library()
        # Whatever device has no kernel of its own gets the references.
        compiled: dict[str, frozenset[str]] = {}
        for device, key in _DEVICES.items():
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            missing = [name for name in ours if not has(f"{NAMESPACE}::{name}", key)]
            for name in (*missing, *in_python):
                library.impl(name, (ours.get(name) or in_python[name]).implementation(device), key)
            compiled[device] = frozenset(ours).difference(missing)
        register_fakes({**ours, **in_python}, library)
        _compiled = compiled


def available(device: str = "cpu") -> bool:
    """Whether the operators run compiled kernels on this kind of device ("cpu" or "cuda"); cuDNN's are not counted."""
    from .registry import CUDNN

    return all(has(name, device) for name in operators().keys() - CUDNN)


def has(name: str, device: str) -> bool:
    """Whether this operator runs a compiled kernel on this kind of device, not its plain-torch reference."""
    load()
    assert _compiled is not None
    return name in _compiled[device]


def runs_here(op: str, device: str) -> bool:
    """Whether an operator, by its qualified name, runs on this kind of device by its kernel, not by its reference.

    Operators of PyTorch always do.
    """
    from .registry import NAMESPACE

    namespace, name, _ = op.split(".") if op.count(".") == 2 else ("", op, "")
    if namespace != NAMESPACE:
        return True
    if name in operators():
        return has(name, device)
    known = python_operators().get(name)
    return known is None or known.kernel is None or known.runs_on(device)


def twin(name: str) -> Callable[..., Any] | None:
    """The plain-torch twin of an operator that has a kernel, compiled or another package's; None if it has none."""
    known = operators().get(name) or python_operators().get(name)
    of_kernel = known is not None and (name in operators() or known.kernel is not None)
    return known.reference if known is not None and of_kernel else None


def status() -> str:
    """One line that says whether compiled kernels or plain-torch twins run; if twins, why, and how to build kernels."""
    from .. import build

    load()
    if _reason:
        return f"plain-torch twins in use (correct, slower): {_reason}; build with: python -m monet_like.build"
    devices = [device for device in _DEVICES if available(device)]
    text = "compiled kernels in use for " + " and ".join(devices)
    if "cuda" in devices:
        whole = has("cudnn_convolution", "cuda")
        return text if whole else text + "; without cuDNN's algorithms, which need its headers to be compiled"
    if build.library_path("kernels_cuda").exists():
        text += "; the CUDA kernels are built, but there is no GPU"
    else:
        text += "; CUDA tensors use the plain-torch twins (build with: MONET_LIKE_CUDA=1 python -m "
        text += "monet_like.build, needs nvcc)"
    return text


def _load_library() -> str:
    """Load the compiled library. Returns the empty string, or the reason why it cannot be used."""
    import ctypes
    import os

    import torch

    from .. import build

    if os.environ.get("MONET_LIKE_KERNELS", "").lower() == "reference":
        return "MONET_LIKE_KERNELS=reference asks for them"
    if not build.library_path().exists():
        return "the compiled kernels are not built"
    if not build.is_loadable():
        return "the compiled kernels are of another version of monet_like"
    try:
        kernels = ctypes.CDLL(str(build.library_path()))
        kernels.monet_like_set_cpu_capability(torch.backends.cpu.get_cpu_capability().encode())
        if torch.cuda.is_available() and build.library_path("kernels_cuda").exists():
            torch.ops.load_library(str(build.library_path("kernels_cuda")))
            if build.fits_this_torch("kernels_cudnn"):
                with contextlib.suppress(OSError):  # another cuDNN: then only its algorithms are left out
                    torch.ops.load_library(str(build.library_path("kernels_cudnn")))
    except OSError as error:
        return f"the compiled kernels could not be loaded ({error})"
    return ""
