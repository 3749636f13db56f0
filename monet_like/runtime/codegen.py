"""Generates straight-line Python from tasks: operator calls, each tensor deleted right after its last use.

The source text is made of variable names and literals that this module writes itself; whatever is not a plain
literal is bound as a constant. Nothing from a file ever becomes source text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.program import Call, Ref, Task, refs
from .operators import resolve
from .out_of_memory import TASKS, as_pytorchs


@dataclass(frozen=True)
class Block:
    """A function to generate.

    Attributes:
        takes: values passed in, as one list that the function empties.
        tasks: the tasks that it runs, in order.
        results: tensors it returns: (view calls, ref) each; their values must exist at the end.
        carries: values handed on, as a list.
    """

    takes: tuple[int, ...]
    tasks: tuple[Task, ...]
    results: tuple[tuple[tuple[Call, ...], Ref | None], ...] = ()
    carries: tuple[int, ...] = ()


def compile_block(
    block: Block,
    name: str,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    before: Callable[[], None] | None = None,
) -> Callable[[list[Any]], tuple[tuple[Any, ...], list[Any]]]:
    """The function of a block: ``function(list) -> (results, carried)``.

    Args:
        name: appears in tracebacks.
        functions: replacements for operators of these names; all others are PyTorch's own.
        before: called before every task.
    """
    writer = _Writer(functions or {}, before)
    writer.unpack(block.takes)
    results = writer.block(block)
    listed = ", ".join(results) + ("," if len(results) == 1 else "")
    writer.line(f"return ({listed}), [{_names(block.carries)}]")
    return writer.function(name)


def compile_chain(
    blocks: Sequence[Block],
    name: str,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    before: Callable[[], None] | None = None,
) -> Callable[[list[Any]], Iterator[list[Any]]]:
    """Blocks, each of which takes what the one before it carries, as one generator function.

    ``function(list)`` runs a block whenever it is asked for the next list: that of the block's results, which the
    caller is to empty. Between two blocks the generator holds what the first carries and nothing else.
    """
    writer = _Writer(functions or {}, before)
    writer.unpack(blocks[0].takes if blocks else ())
    for block in blocks:
        results = writer.block(block)
        writer.line(f"given += [{', '.join(results)}]")
        carried = {f"v{v}" for v in block.carries}
        done = dict.fromkeys((*(n for calls, _ in block.results for c in calls for n in _mentioned(c)), *results))
        writer.delete([name for name in done if name not in carried and name not in ("None", "_")])
        writer.line("yield given")
    return writer.function(name)


def needed_at_end(block: Block) -> set[int]:
    """The values that must exist when a block ends: those it returns or carries."""
    needed = set(block.carries)
    for calls, ref in block.results:
        needed.update(value for call in calls for value in _values(call))
        if ref is not None and isinstance(ref.name, int):
            needed.add(ref.name)
    return needed


def liveness(tasks: Sequence[Task], needed: Iterable[int]) -> tuple[list[list[int]], tuple[int, ...]]:
    """Find the last reads of values.

    Args:
        needed: values that exist when the tasks have run.

    Returns:
        For every task, the values that nothing reads after it before they are written again.
        The values alive before the first task: read or needed later, before they are written again.
    """
    alive = dict.fromkeys(needed)
    dying: list[list[int]] = []
    for task in reversed(tasks):
        dying.append([v for v in dict.fromkeys((*task.reads, *task.writes)) if v not in alive])
        for value in task.writes:
            alive.pop(value, None)
        alive.update(dict.fromkeys(task.reads))
    return dying[::-1], tuple(alive)


def _mentioned(call: Call) -> list[str]:
    """The variables of a call, results last; "_" for results that are not wanted."""
    results = ["_" if out is None else _name(out) for out in call.outs]
    return list(dict.fromkeys([*map(_name, refs(call)), *results]))


def _is_value(name: str) -> bool:
    """Whether a variable is a value's own tensor, not a temporary of a task."""
    return name[0] == "v" and name[1:].isdigit()


def _values(call: Call) -> list[int]:
    return [ref.name for ref in refs(call) if isinstance(ref.name, int)]


def _name(ref: Ref) -> str:
    return f"v{ref.name}" if isinstance(ref.name, int) else ref.name


def _names(values: Sequence[int]) -> str:
    return ", ".join(f"v{v}" for v in values)


class _Writer:
    """Collects source lines and the constants they mention."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], before: Callable[[], None] | None) -> None:
        self.functions, self.before = functions, before
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.seen: dict[tuple[str, str], str] = {}
        self.tasks: list[tuple[int, Task]] = []

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def unpack(self, values: Sequence[int]) -> None:
        """Take the values out of the list that is passed in."""
        if values:
            self.line(f"{_names(values)}{',' if len(values) == 1 else ''} = given")
        self.line("given.clear()")

    def block(self, block: Block) -> list[str]:
        """Write a block's tasks and the views that it returns; the variables of what it returns."""
        dying, first = liveness(block.tasks, needed_at_end(block))
        alive = set(first)
        self.delete([f"v{v}" for v in block.takes if v not in alive])
        for task, dead in zip(block.tasks, dying, strict=True):
            self.tasks.append((len(self.lines) + 2, task))  # the first line is the function's
            last = {name: place for place, call in enumerate(task.calls) for name in _mentioned(call)}
            # Values that the task reads exist until it ends, as planned, but for one that it takes over.
            early = {f"v{v}" for v in dead if v == task.overwrites}
            if self.before is not None:
                self.line(f"{self.constant('before', self.before, key='')}()")
            for place, call in enumerate(task.calls):
                self.call(call)
                over = [name for name in _mentioned(call) if last[name] == place]
                self.delete([name for name in over if name in early or not _is_value(name)])
            self.delete([name for v in dead if (name := f"v{v}") in last and name not in early])
        for call in (call for calls, _ in block.results for call in calls):
            self.call(call)
        return ["None" if ref is None else _name(ref) for _, ref in block.results]

    def delete(self, names: Sequence[str]) -> None:
        if names:
            self.line(f"del {', '.join(names)}")

    def call(self, call: Call) -> None:
        """Write one call."""
        called = self.functions.get(call.op) or resolve(call.op)
        function = self.constant(f"op_{call.op.replace('.', '_')}", called, key=call.op)
        arguments = [self.literal(a) for a in call.args] + [f"{k}={self.literal(v)}" for k, v in call.kwargs]
        text = f"{function}({', '.join(arguments)})"
        if not call.outs:
            self.line(text)
            return
        names = ["_" if out is None else _name(out) for out in call.outs]
        target = ", ".join(names) + ("," if call.unpack and len(names) == 1 else "")
        self.line(f"{target} = {text}")

    def literal(self, value: Any) -> str:
        if isinstance(value, Ref):
            return _name(value)
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self.literal, value))}]"
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self.constant("constant", value, key=f"{type(value).__name__}:{value}")

    def constant(self, prefix: str, value: Any, key: str) -> str:
        name = self.seen.get((prefix, key))
        if name is None:
            name = self.seen[prefix, key] = prefix if prefix.startswith("op_") else f"{prefix}_{len(self.seen)}"
            self.constants[name] = value
        return name

    def function(self, name: str) -> Callable[..., Any]:
        source = "\n".join(("def run(given):", *self.lines)) + "\n"
        namespace = {**self.constants, TASKS: self.tasks}
        exec(compile(source, f"<monet_like {name}>", "exec"), namespace)
        run: Callable[..., Any] = as_pytorchs(namespace["run"])
        run.__doc__ = source
        return run
