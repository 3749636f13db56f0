"""Units. A budget of "10" means 10 GiB, as in MONeT; "8 GB" and "8 GiB" both mean 8 * 2**30 bytes.

The field writes GB for 2**30 bytes (CUDA tools, MONeT's tables), so this package does too.
"""

from __future__ import annotations

import re

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
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


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


def format_seconds(seconds: float) -> str:
    """Format seconds, such as ``1.23 s``, ``45.6 ms`` or ``7.8 us``."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"
