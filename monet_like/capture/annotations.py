"""Granularity by hand: what must be kept, must not be, or is run again only as a whole.

A mark holds for all that a model's forward makes while it is active. It becomes part of the captured program: a schedule
for other marks is a schedule for another program.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch.fx.traceback
from torch import fx, nn

from ..errors import UsageError
from .layers import in_modules

#: A kind, and which of the marks of that kind it is.
Mark = tuple[str, int]
KINDS = ("keep", "recompute", "together")
_KEY = "monet_like"
_ATTRIBUTE = "_monet_like_mark"
_numbers = itertools.count()


def mark(kind: str, module: nn.Module | None = None) -> contextlib.AbstractContextManager[None]:
    """Mark what is made inside a ``with`` statement, or by every call of ``module``.

    ``keep``: it is made once and, where the backward needs it, kept. ``recompute``: the backward makes it anew, as with
    ``torch.utils.checkpoint``. ``together``: what one ``with`` statement or call makes is run again as a whole or not
    at all. Marks do not change what a model computes. The innermost one holds. What cannot be run again, such as the mask
    of a dropout, is kept all the same.

    Args:
        kind: ``keep``, ``recompute`` or ``together``.
        module: marked for good, instead of a ``with`` statement.

    Raises:
        UsageError: an unknown kind.
    """
    if kind not in KINDS:
        raise UsageError(f"mark {kind!r} is unknown; give {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if module is not None:
        setattr(module, _ATTRIBUTE, kind)
        return contextlib.nullcontext()
    return _active(kind)


@contextlib.contextmanager
def _active(kind: str) -> Iterator[None]:
    with torch.fx.traceback.annotate({_KEY: (kind, next(_numbers))}):
        yield


def marked_modules() -> contextlib.AbstractContextManager[None]:
    """Calls of marked modules are marked; for tracing."""
    return in_modules(lambda module: _active(kind) if (kind := module.__dict__.get(_ATTRIBUTE)) else None)


def mark_of(node: fx.Node) -> Mark | None:
    """The mark of a traced node."""
    found: Mark | None = (node.meta.get("custom") or {}).get(_KEY)
    return found
