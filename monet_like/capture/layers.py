"""Where in a model a value comes from: the qualified name of the module whose call makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx.traceback
from torch import fx, nn

_KEY = "monet_like_layer"


@contextlib.contextmanager
def in_modules(context: Callable[[nn.Module], contextlib.AbstractContextManager[None] | None]) -> Iterator[None]:
    """Every call of a module runs in ``context(module)``, where that is not None; for tracing."""
    entered: list[tuple[nn.Module, contextlib.AbstractContextManager[None]]] = []

    def enter(module: nn.Module, *_: Any) -> None:
        if (found := context(module)) is not None:
            entered.append((module, found))
            found.__enter__()

    def leave(module: nn.Module, *_: Any) -> None:
        if entered and entered[-1][0] is module:
            entered.pop()[1].__exit__(None, None, None)

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def named_layers(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Nodes traced in a call of a submodule of ``model`` carry its name; those of the backward do too."""
    names = {id(module): name for name, module in model.named_modules()}

    def named(module: nn.Module) -> contextlib.AbstractContextManager[None] | None:
        name = names.get(id(module))
        return None if name is None else torch.fx.traceback.annotate({_KEY: name})

    return in_modules(named)


def layer_of(node: fx.Node) -> str | None:
    """The name of the innermost module in whose call a node was traced; "" for the model itself, None if unknown."""
    found: str | None = (node.meta.get("custom") or {}).get(_KEY)
    return found
