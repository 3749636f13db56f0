"""The operators `torch.ops.monet_like.*`: packed masks and caches, byte-offset pooling, fused batch norms and activations,
RMS norm, cuDNN's convolution algorithms, SyncBatchNorm in parts.

Importing this package does nothing. `load()` makes the operators exist: from the compiled library where there is
one, else from the plain-torch twins in `reference`, under the same names and with the same results.
`python -m monet_like.build` compiles the library.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["available", "has", "load", "runs_here", "status"]

_lock = threading.Lock()
_compiled: Mapping[str, frozenset[str]] | None = None  # operators with compiled kernels, by device; None until load()
_reason = "not loaded yet"
_keep_alive: list[Any] = []  # torch.library registrations live as long as their Library object

_DEVICES = {"cpu": "CPU", "cuda": "CUDA"}


def load() -> None:
    """Make `torch.ops.monet_like.*` available. Safe to call often, from any thread."""
    global _compiled, _reason
    with _lock:
        if _compiled is not None:
            return
        import torch

        from . import fakes, reference, sync_batch_norm
        from .registry import NAMESPACE, SCHEMAS

        _reason = _load_library()
        if _reason:
            definitions = torch.library.Library(NAMESPACE, "DEF")
            _keep_alive.append(definitions)
            for name, schema in SCHEMAS.items():
                definitions.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        # Whatever device has no kernel of its own gets the twins.
        implementations = torch.library.Library(NAMESPACE, "IMPL")
        _keep_alive.append(implementations)
        compiled: dict[str, frozenset[str]] = {}
        for device, key in _DEVICES.items():
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            missing = [name for name in SCHEMAS if not has(f"{NAMESPACE}::{name}", key)]
            for name in missing:
                implementations.impl(name, getattr(reference, name), key)
            compiled[device] = frozenset(SCHEMAS).difference(missing)
        fakes.register()
        _keep_alive.append(sync_batch_norm.register())
        _compiled = compiled


def available(device: str = "cpu") -> bool:
    """Whether the operators run compiled kernels on this kind of device ("cpu" or "cuda"), but for cuDNN's."""
    from .registry import CUDNN, SCHEMAS

    return all(has(name, device) for name in SCHEMAS.keys() - CUDNN)


def has(name: str, device: str) -> bool:
    """Whether this operator runs a compiled kernel on this kind of device, not its plain-torch twin."""
    load()
    assert _compiled is not None
    return name in _compiled[device]


def runs_here(op: str, device: str) -> bool:
    """Whether an operator by its qualified name is another's or has a compiled kernel on this kind of device."""
    from .registry import NAMESPACE, SCHEMAS

    namespace, name, _ = op.split(".") if op.count(".") == 2 else ("", op, "")
    return namespace != NAMESPACE or name not in SCHEMAS or has(name, device)


def status() -> str:
    """One line: what runs, and if it is not the compiled kernels, why and what to do."""
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
    """Load the compiled library; why not, if not."""
    import os

    import torch

    from .. import build

    if os.environ.get("MONET_LIKE_KERNELS", "").lower() == "reference":
        return "MONET_LIKE_KERNELS=reference asks for them"
    if not build.library_path().exists():
        return "the compiled kernels are not built"
    built_for = build.manifest().get("torch")
    if built_for != torch.__version__:
        # The C++ interface changes between releases: loading such a library can crash rather than fail.
        return f"the compiled kernels were built for torch {built_for}, this is torch {torch.__version__}"
    try:
        torch.ops.load_library(str(build.library_path()))
        if torch.cuda.is_available() and build.library_path("kernels_cuda").exists():
            torch.ops.load_library(str(build.library_path("kernels_cuda")))
            if build.library_path("kernels_cudnn").exists():
                with contextlib.suppress(OSError):  # another cuDNN: then only its algorithms are left out
                    torch.ops.load_library(str(build.library_path("kernels_cudnn")))
    except OSError as error:
        return f"the compiled kernels could not be loaded ({error})"
    return ""
