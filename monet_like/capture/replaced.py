"""Other members in the place of PyTorch's own, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(holder: Any, **members: Any) -> Iterator[None]:
    """Put others in the place of members of a module, class or object; its own come back at the end.

    A member that ``holder`` has from a base class is its base's again.
    """
    own = {name: vars(holder)[name] for name in members if name in vars(holder)}
    try:
        for name, member in members.items():
            setattr(holder, name, member)
        yield
    finally:
        for name in members:
            if name in own:
                setattr(holder, name, own[name])
            else:
                delattr(holder, name)
