"""Prices of operators that outlive a process: a benchmark that is run in parts has one list of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from monet_like.errors import UsageError
from monet_like.files import write_atomically
from monet_like.inductor import prices
from monet_like.ir.program import Cost
from monet_like.profile.devices import DeviceLimits, device_name


@contextmanager
def kept_prices(path: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Within, plans and benchmarks take the prices of a file.

    What is not there is timed more often than for a user's plan, and the least counts: two contenders that call other
    operators are compared by prices of one call each, and other work on the machine only ever makes a call slower.

    Args:
        path: JSON: the device's rates, and seconds and workspace of every call of an operator that was measured. It is
            made if there is none.
        device: that the prices are of.

    Yields:
        A function that writes what was measured anew to the file.

    Raises:
        UsageError: the prices are of another device.
    """
    name = device_name(device)
    known = json.loads(path.read_text()) if path.exists() else None
    if known is None:
        limits, found = prices.measured_limits(device), {}
    elif known["device"] != name:
        raise UsageError(f"the prices in {path} are of {known['device']}, and this is {name}; give another folder")
    else:
        rates = {key: tuple(rate) if isinstance(rate, list) else rate for key, rate in known["limits"].items()}
        limits = DeviceLimits(**rates)
        found = {key: None if cost is None else Cost(*cost) for key, cost in known["calls"].items()}

    def save() -> None:
        calls = {key: None if cost is None else (cost.seconds, cost.workspace_bytes) for key, cost in found.items()}
        content = {"device": name, "limits": vars(limits), "calls": calls}
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())

    prices.device_of.cache_clear()
    often = patch.multiple(prices, MEASURED=found, TIMED_CALLS=20, ENOUGH_SECONDS=0.3)
    with patch.object(prices, "measured_limits", lambda _: limits), often:
        yield save
    prices.device_of.cache_clear()
