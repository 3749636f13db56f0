"""Processes that plan together: one works, all get its result or its error. Only text travels, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..errors import InfeasibleError, MonetError


def processes() -> int:
    """The number of processes of the default group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def from_first(work: Callable[[], Any], *, together: bool) -> Any:
    """Do ``work`` in the first process of the group; every process gets the result.

    Args:
        work: returns plain data that JSON can hold. What it raises is raised in every process.
        together: False: every process works for itself.
    """
    if not together or processes() == 1:
        return _plain(work())
    error: BaseException | None = None
    answer = ""
    if dist.get_rank() == 0:
        try:
            answer = json.dumps({"result": work()})
        except BaseException as found:  # the others wait for an answer whatever happened
            error, answer = found, json.dumps({"error": _told(found)})
    sent = [answer]
    dist.broadcast_object_list(sent, src=0)
    if error is not None:
        raise error
    content = json.loads(sent[0])
    if "error" in content:
        raise _raised(content["error"])
    return content["result"]


def from_all(mine: Any, *, together: bool) -> list[Any]:
    """The plain data that every process gives, in the order of their ranks."""
    if not together or processes() == 1:
        return [_plain(mine)]
    sent: list[Any] = [None] * processes()
    dist.all_gather_object(sent, json.dumps(mine))
    return [json.loads(text) for text in sent]


def _plain(content: Any) -> Any:
    """The same data as another process would get it."""
    return json.loads(json.dumps(content))


def _told(error: BaseException) -> dict[str, Any]:
    """An error as plain data."""
    told: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, InfeasibleError):
        told |= {"smallest_bytes": error.smallest_bytes, "step": error.step, "proven": error.proven}
    return told


def _raised(told: dict[str, Any]) -> Exception:
    """The error of the first process, for another one."""
    kind, message = str(told["kind"]), f"{told['message']} (found by the process with rank 0, which plans for all)"
    if kind == InfeasibleError.__name__:
        return InfeasibleError(message, told["smallest_bytes"], told["step"], proven=bool(told["proven"]))
    known: dict[str, type[MonetError]] = {found.__name__: found for found in MonetError.__subclasses__()}
    return known[kind](message) if kind in known else RuntimeError(f"{kind}: {message}")
