"""Units and budgets. A budget of "10" means 10 GiB, as in MONeT; "8 GB" and "8 GiB" both mean 8 * 2**30 bytes.

The field writes GB for 2**30 bytes (CUDA tools, MONeT's tables), so this package does too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError

KIB = 2**10
MIB = 2**20
GIB = 2**30

#: No memory is larger, and no number of the operating system's holds more.
MOST_BYTES = 2**63 - 1
#: Wall seconds that anything may be limited to: 30 years. Clocks and solvers count no further.
MOST_SECONDS = 1e9

_FACTORS = {
    "": GIB,
    "b": 1,
    "kb": KIB,
    "kib": KIB,
    "mb": MIB,
    "mib": MIB,
    "gb": GIB,
    "gib": GIB,
    "tb": 2**40,
    "tib": 2**40,
}
_NUMBER = r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]*)\s*")
_SHARE = re.compile(rf"\s*{_NUMBER}\s*%\s*")
#: The largest share of plain PyTorch's peak that a budget may be.
_MOST_PERCENT = 1000


@dataclass(frozen=True)
class Budget:
    """A memory budget: an amount, a share of plain PyTorch's peak, or what is free on the card.

    Attributes:
        bytes: the amount; None: a share, or what is free.
        share: of plain PyTorch's peak, 0.6 for "60%"; 0 beside an amount.
        is_card: what is free on the device, see `monet_like.profile.card_budget`, which makes it an amount.
    """

    bytes: int | None = None
    share: float = 0.0
    is_card: bool = False

    def __str__(self) -> str:
        if self.is_card:
            return "card"
        return f"{100 * self.share:g} %" if self.bytes is None else format_bytes(self.bytes)

    def of(self, plain_peak_bytes: int) -> int:
        """The budget in bytes, where plain PyTorch's step has this peak.

        Raises:
            UsageError: it is what is free on the card, where no card is looked at.
        """
        if self.is_card:
            raise UsageError('a budget of "card" is not known here; give an amount such as "8 GB", or "60%"')
        return int(self.share * plain_peak_bytes) if self.bytes is None else self.bytes

    @property
    def limit(self) -> int | Callable[[int], int]:
        """The amount, or for a share the function from plain PyTorch's peak to bytes; the compiler takes either."""
        return self.of if self.bytes is None else self.bytes


def parse_budget(budget: str | int | Budget, name: str = "memory budget") -> Budget:
    """Read a memory budget, in Python or from the command line.

    Args:
        budget: text: GB as a number (``"10"``), an amount with its unit (``"565 MB"``), a share of plain PyTorch's
            peak (``"60%"``), or ``"card"``, what is free on the device; an int: bytes.
        name: of the budget, for errors.

    Raises:
        UsageError: nothing of these, not more than 0, or more than any memory.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, str | int):
        raise UsageError(f'{name} {budget!r} must be like "8 GB", bytes as an int, "60%" or "card"')
    if isinstance(budget, int):
        if budget < 1:
            raise UsageError(f"{name} {budget} bytes must be more than 0")
        if budget > MOST_BYTES:
            raise UsageError(f"{name} must be at most {MOST_BYTES} bytes, which no memory has; give less")
        return Budget(budget)
    if budget.strip().lower() == "card":
        return Budget(is_card=True)
    if not budget.strip().endswith("%"):
        return Budget(parse_bytes(budget))
    match = _SHARE.fullmatch(budget)
    if match is None:
        raise UsageError(f'{name} {budget[:40]!r} is no percentage of plain PyTorch\'s peak; give such as "60%"')
    percent = float(match.group(1))
    if not 0 < percent <= _MOST_PERCENT:
        raise UsageError(f"{name} {budget[:40]!r} must be more than 0 % and at most {_MOST_PERCENT} %")
    return Budget(share=percent / 100)


def parse_budgets(text: str) -> list[Budget]:
    """Read budgets such as ``10,8,6.5`` (GB) or ``80%,50%`` (of plain PyTorch's peak); see `parse_budget`.

    Raises:
        UsageError: not such a list.
    """
    found = [parse_budget(part) for part in filter(None, (part.strip() for part in text.split(",")))]
    if not found:
        raise UsageError(f"budgets {text!r} must be a list such as 10,8,6 or 80%,50%")
    return found


def parse_bytes(text: str | float) -> int:
    """Read an amount of memory: ``"10"``, ``10`` or ``10.5`` (GiB), ``"565 MB"``, ``"8 GiB"``.

    Raises:
        UsageError: not a positive amount that a memory may have.
    """
    match = _SIZE.fullmatch(str(text))
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _FACTORS:
        raise UsageError(
            f"memory budget {text!r} is not an amount of memory; give GB as a number (10, 5.5) "
            'or an amount with its unit ("565 MB", "8 GB")'
        )
    amount = float(match.group(1)) * _FACTORS[unit]
    if amount < 1:
        raise UsageError(f"memory budget {text!r} must be more than 0; give GB as a number, such as 10")
    if amount >= MOST_BYTES:
        raise UsageError(f"memory budget {str(text)[:40]!r} is more than any memory; give GB as a number, such as 10")
    return int(amount)


def format_bytes(count: float) -> str:
    """Format bytes, such as ``10.00 GB``, ``565.0 MB`` or ``3.2 KB``."""
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GB"
    if abs(count) >= MIB:
        return f"{count / MIB:.1f} MB"
    if abs(count) >= KIB:
        return f"{count / KIB:.1f} KB"
    return f"{count:.0f} B"


def format_apart(*counts: float) -> list[str]:
    """Format bytes as `format_bytes`, and those that would look the same though they differ also in whole bytes."""
    texts = [format_bytes(count) for count in counts]
    alike = len(set(texts)) < len(set(counts))
    return [f"{text} ({count:.0f} bytes)" for text, count in zip(texts, counts, strict=True)] if alike else texts


def format_seconds(seconds: float) -> str:
    """Format seconds, such as ``1.23 s``, ``45.6 ms`` or ``7.8 us``."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"
