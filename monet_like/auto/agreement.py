"""Processes that plan together: one works, all get its result or its error. Only text travels, as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, TypeVar

import msgspec
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import InfeasibleError, MonetError, UsageError

#: How the processes of the default group plan. ``alone``: each for itself, whenever it likes. ``same``: the first one
#: plans for all. ``own``: each has a plan of its own, but they rehearse together, because the step of one needs the
#: others, as in a pipeline; an error of one is raised in all.
Sharing = Literal["alone", "same", "own"]

_T = TypeVar("_T")


def processes() -> int:
    """The number of processes of the default group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def planned_by(work: Callable[[], _T], sharing: Sharing, kind: Any = Any) -> _T:
    """The result of ``work``: the first process's for all, or each process's own.

    Args:
        work: returns frozen data that JSON can hold, such as a dataclass. If processes share anything, what it raises
            in one is raised in all.
        kind: of that data, such as ``tuple[Point, ...]``.
    """
    if sharing != "same" or processes() == 1:
        return all_do(work, sharing)
    error: BaseException | None = None
    answer = ""
    if dist.get_rank() == 0:
        try:
            answer = json.dumps({"result": work()}, default=_fields)
        except BaseException as found:  # the others wait for an answer whatever happened
            error, answer = found, json.dumps({"error": _told(found)})
    sent = [answer]
    dist.broadcast_object_list(sent, src=0)
    if error is not None:
        raise error
    content = json.loads(sent[0])
    if "error" in content:
        raise _raised(content["error"])
    result: _T = msgspec.convert(content["result"], kind)
    return result


def all_do(work: Callable[[], _T], sharing: Sharing) -> _T:
    """Do ``work`` in every process; if it fails in one, raise in all. Without sharing: just do it."""
    if sharing == "alone" or processes() == 1:
        return work()
    result: Any = None
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as found:  # the others wait for a word whatever happened
        error = found
    every = gathered(None if error is None else _told(error), "same")
    if error is not None:
        raise error
    for rank, told in enumerate(every):
        if told is not None:
            raise _raised(told, f"found by the process with rank {rank}, whose step needs this one")
    done: _T = result
    return done


def all_agree(flag: bool, sharing: Sharing) -> bool:
    """Whether it holds in every process; each one's own word unless they have plans of their own and
    rehearse together.
    """
    return all(gathered(flag, "same")) if sharing == "own" else flag


def gathered(mine: Any, sharing: Sharing) -> list[Any]:
    """The plain data that every process gives, in the order of their ranks; just this one's if plans are
    not the same.
    """
    if sharing != "same" or processes() == 1:
        return [_plain(mine)]
    sent: list[Any] = [None] * processes()
    dist.all_gather_object(sent, json.dumps(mine))
    return [json.loads(text) for text in sent]


def collective_calls() -> int:
    """How often this process has called others, over all groups; 0 where a back end does not count."""
    count = 0
    if processes() > 1:
        groups: Any = dist.distributed_c10d._world.pg_map
        for group in groups:
            with contextlib.suppress(RuntimeError):
                count += group._get_sequence_number_for_group()
    return count


def in_counted_forward() -> bool:
    """Whether `DistributedDataParallel` runs its first forward of a graph that it was told is static."""
    around: Any = DistributedDataParallel._get_active_ddp_module()
    return around is not None and around.static_graph and not around._static_graph_delay_allreduce_enqueued


def check_uncounted(model: nn.Module) -> None:
    """Refuse to rehearse steps of a model where the gradients of a rehearsal would be counted."""
    if in_counted_forward():
        raise UsageError(
            f"{type(model).__name__} would be planned in the first step of "
            "DistributedDataParallel(static_graph=True), which counts gradients, also those of rehearsals, and then "
            "waits for as many in each step; give auto_schedule example inputs, so that it plans before, or leave "
            "static_graph out"
        )


def _plain(content: Any) -> Any:
    """The same data as another process would get it."""
    return json.loads(json.dumps(content))


def _fields(record: Any) -> dict[str, Any]:
    """A dataclass's fields, which JSON can hold."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _told(error: BaseException) -> dict[str, Any]:
    """An error as plain data."""
    told: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, InfeasibleError):
        told |= {"smallest_bytes": error.smallest_bytes, "step": error.step, "proven": error.proven}
    return told


def _raised(told: dict[str, Any], by: str = "found by the process with rank 0, which plans for all") -> Exception:
    """The error of another process, for this one."""
    kind, message = str(told["kind"]), f"{told['message']} ({by})"
    if kind == InfeasibleError.__name__:
        return InfeasibleError(message, told["smallest_bytes"], told["step"], proven=bool(told["proven"]))
    known: dict[str, type[MonetError]] = {found.__name__: found for found in MonetError.__subclasses__()}
    return known[kind](message) if kind in known else RuntimeError(f"{kind}: {message}")
