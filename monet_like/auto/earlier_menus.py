"""Menus that were found quickly for a block's program, to be taken again where the same program has other sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..capture.captured import Captured
from ..compiler.prepared import Prepared
from ..errors import InfeasibleError
from ..ir.schedule import Schedule
from .agreement import Sharing, all_agree

_T = TypeVar("_T")

#: The newest that are kept.
_MOST = 16


@dataclass(frozen=True)
class Earlier:
    """A program with its costs, and the schedules of its menu; none, if they are of the program with its gradients in
    another order.
    """

    ready: Prepared
    schedules: tuple[Schedule, ...]


class EarlierMenus:
    """The newest menus. Copies are empty.

    Attributes:
        taken: how many have been taken again.
    """

    def __init__(self) -> None:
        self._menus: list[Earlier] = []
        self.taken = 0

    def alike(self, captured: Captured) -> Earlier | None:
        """The newest of the same program, at whatever sizes."""
        return next((menu for menu in reversed(self._menus) if _is_same(menu.ready.captured, captured)), None)

    def add(self, ready: Prepared, schedules: tuple[Schedule, ...]) -> None:
        """Keep a menu, in place of an earlier one of the same program."""
        others = [menu for menu in self._menus if menu.ready.captured is not ready.captured]
        self._menus = [*others, Earlier(ready, schedules)][-_MOST:]

    def clear(self) -> None:
        """Forget all of them."""
        self._menus.clear()

    def tried(self, plan: Callable[[], _T], sharing: Sharing) -> _T:
        """``plan()``; once more without these menus where it has taken some and nothing of them fits."""
        taken = self.taken
        try:
            return plan()
        except InfeasibleError:
            if all_agree(self.taken == taken, sharing):
                raise
            self.clear()
            return plan()

    def __reduce__(self) -> Any:
        return EarlierMenus, ()


def _is_same(one: Captured, other: Captured) -> bool:
    return (
        one.program.fingerprint == other.program.fingerprint
        and one.plain.fingerprint == other.plain.fingerprint
        and (one.device, one.made_last) == (other.device, other.made_last)
    )
