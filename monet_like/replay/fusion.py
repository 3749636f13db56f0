"""Fuses runs of neighbouring tasks of a schedule: TorchInductor compiles each run (a piece) within the budget.

A piece is as long as this holds, and else is cut:

* every call in it is elementwise, a reduction, a normalisation, a concatenation or a view. Products, convolutions,
  random operators, indexing and most of this package's own kernels stay the calls they are, between pieces;
* no value is written that the piece has touched before: a value and its rerun are never in one graph, where Inductor
  would merge them;
* what exists before the piece, and what the compiled piece allocates while it runs, stay within the schedule's budget.
  That is measured when the piece is built. A value that is made and dies inside the piece may never exist.

Operators that write in place write in place still: the graph computes the new contents and copies them back last,
where anyone reads them later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..capture.captured import Captured, TensorMeta, cost_key, fake_mode
from ..errors import UsageError
from ..ir.program import RESIDENT_KINDS, Call, Ref, Task, refs
from ..profile.measure import allocated_peak
from ..profile.task_inputs import Inputs
from ..runtime.codegen import Block, liveness, needed_at_end
from ..runtime.operators import overload, results_of
from .branches import written_values
from .fusible import INLINED, declared, is_fusible, operators_of, target_of
from .fusion_order import Level, in_fusion_order, levels_of, workspaces_of
from .segments import Runs, Stretch, with_run_bytes

#: Takes a list of tensors, which it empties, and returns fresh tensors.
Compiled = Callable[[list[Any]], Sequence[torch.Tensor]]
#: The names that pieces, and the tensor that one wrote into, have in generated code.
_PIECE = "inductor.piece"
_SAME = "inductor.same"


@dataclass(frozen=True)
class Fused:
    """Blocks of generated code in which runs of tasks are replaced by compiled pieces.

    Attributes:
        blocks: as given, the tasks of a piece replaced by one that calls it.
        functions: by the name of the operator that such a task calls.
        operators: calls of operators, views not counted, in the blocks as given.
        compiled: how many of these are in pieces.
        pieces, distinct: how many pieces there are, and how many of them differ.
        peak_bytes: the most memory of the step, with pieces.
        moved_bytes: what tasks and pieces read and write, each value once.
    """

    blocks: tuple[Block, ...]
    functions: dict[str, Callable[..., Any]]
    operators: int
    compiled: int
    pieces: int
    distinct: int
    peak_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class _Graph:
    """The calls of a piece, its inputs and its outputs.

    Attributes:
        inputs: values that exist before.
        outputs: values that it makes and that outlive it.
        same: (output, the input whose storage it takes over).
        changed: inputs that it writes into and whose storage outlives it.
    """

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    same: tuple[tuple[int, int], ...]
    changed: frozenset[int]


@dataclass(frozen=True)
class _Piece:
    """A compiled piece, or the finding that Inductor's results have other layouts than PyTorch's.

    Attributes:
        run: None: not to be used.
        name: in generated code.
        rise_bytes: the most that it allocates, results included.
    """

    run: Compiled | None
    name: str
    rise_bytes: int


def fuse(
    captured: Captured,
    runs: Runs,
    stretches: Sequence[Stretch],
    cut_into: Callable[[Runs], Sequence[Block]],
    within_bytes: int,
    told: Callable[[str, int, int], None] | None = None,
) -> tuple[Runs, Fused]:
    """The tasks of a step in the order in which they run, and their code with compiled pieces.

    Args:
        runs: the tasks as planned.
        stretches: of the segments.
        cut_into: code of tasks.
        within_bytes: limit of the memory at any time; if the values of the tasks take more, that is.
        told: called before each run with its first task, and how many tasks are done of how many, in all orders.
    """
    program, known = captured.program, workspaces_of(captured.program, runs)
    limit = max([within_bytes, *(level.bytes for level in levels_of(program, runs))])
    orders: list[tuple[Runs, list[Level]]] = [(runs, levels_of(program, runs, known[0] if known else ()))]
    if known is not None:
        ordered, workspaces, groups = in_fusion_order(captured, runs, stretches, known[0], limit)
        levels = levels_of(program, ordered, workspaces)
        ordered = with_run_bytes(ordered, [level.bytes + known[1] for level in levels])
        grouped = [replace(level, group=group) for level, group in zip(levels, groups, strict=True)]
        orders = [(ordered, grouped), *orders]
    pieces: dict[str, _Piece] = {}

    def tell(before: int, name: str, done: int, total: int) -> None:
        if told is not None:
            told(name, before * total + done, len(orders) * total)

    ways = []
    for before, (order, levels) in enumerate(orders):
        ways.append((order, _Fuser(captured, limit, pieces).run(cut_into(order), levels, partial(tell, before))))
    return best_of(ways, limit)


def best_of(ways: Sequence[tuple[Runs, Fused]], limit_bytes: int) -> tuple[Runs, Fused]:
    """The way that moves the fewest bytes of those that fit.

    In another order results may exist that were to die within a piece, if Inductor or the memory did not permit that.
    """
    return min(ways, key=lambda way: (way[1].peak_bytes > limit_bytes, way[1].moved_bytes))


class _Fuser:
    """Finds pieces and compiles them; equal pieces are compiled once."""

    def __init__(self, captured: Captured, limit_bytes: int, pieces: dict[str, _Piece]) -> None:
        self.captured, self.limit_bytes, self.pieces = captured, limit_bytes, pieces
        self.used: Counter[str] = Counter()
        self.compiled = self.peak_bytes = 0

    def run(self, blocks: Sequence[Block], levels: Sequence[Level], told: Callable[[str, int, int], None]) -> Fused:
        made: list[Block] = []
        done, total = 0, sum(len(block.tasks) for block in blocks)
        for block in blocks:
            dying, _ = liveness(block.tasks, needed_at_end(block))
            tasks: list[Task] = []
            groups = [level.group for level in levels[done : done + len(block.tasks)]]
            for start, stop in runs_of(block.tasks, groups):
                told(block.tasks[start].name, done + start, total)
                there = levels[done + start : done + stop]
                tasks += self._tasks(block.tasks[start:stop], dying[start:stop], there)
            made.append(replace(block, tasks=tuple(tasks)))
            done += len(block.tasks)
        functions: dict[str, Callable[..., Any]] = {_SAME: _same}
        functions.update((p.name, p.run) for p in self.pieces.values() if p.run is not None and p.name in self.used)
        operators = sum(operators_of(task) for block in blocks for task in block.tasks)
        pieces, distinct = sum(self.used.values()), len(self.used)
        ran = (task for block in made for task in block.tasks if operators_of(task))
        moved = sum(self.captured.program.values[v].bytes for task in ran for v in {*task.reads, *task.writes})
        return Fused(tuple(made), functions, operators, self.compiled, pieces, distinct, self.peak_bytes, moved)

    def _tasks(self, tasks: Sequence[Task], dying: Sequence[Sequence[int]], levels: Sequence[Level]) -> Sequence[Task]:
        """Replace tasks by one that calls a compiled piece; by several, or not at all, where that needs too much."""
        if not self._worthwhile(tasks):
            return self._left(tasks, levels)
        values = self.captured.program.values
        graph = _graph(tasks, {v for dead in dying for v in dead if values[v].kind not in RESIDENT_KINDS})
        room = self.limit_bytes - levels[0].before_bytes
        fresh = {*graph.outputs} - {out for out, _ in graph.same}
        if sum(values[value].bytes for value in fresh) <= room:
            piece = self._piece(graph)
            if piece.run is None:
                return self._left(tasks, levels)
            if piece.rise_bytes <= room:
                self.peak_bytes = max(self.peak_bytes, levels[0].before_bytes + piece.rise_bytes)
                self.used[piece.name] += 1
                self.compiled += sum(map(operators_of, tasks))
                known = [task.run_bytes for task in tasks if task.run_bytes is not None]
                return (replace(_calling(piece.name, graph), run_bytes=max(known, default=None)),)
        if len(tasks) == 1:
            return self._left(tasks, levels)
        half = len(tasks) // 2
        first = self._tasks(tasks[:half], dying[:half], levels[:half])
        return (*first, *self._tasks(tasks[half:], dying[half:], levels[half:]))

    def _left(self, tasks: Sequence[Task], levels: Sequence[Level]) -> Sequence[Task]:
        """Tasks that run as they are."""
        self.peak_bytes = max(self.peak_bytes, *(level.bytes for level in levels))
        return tasks

    def _worthwhile(self, tasks: Sequence[Task]) -> bool:
        """Whether fusion saves memory traffic: two of the operators touch the same tensor."""
        values = self.captured.program.values
        touched = Counter(value for task in tasks for value in (*task.reads, *task.writes))
        return any(is_fusible(task) and operators_of(task) > 1 for task in tasks) or any(
            count > 1 and values[value].bytes and values[value].kind not in RESIDENT_KINDS
            for value, count in touched.items()
        )

    def _piece(self, graph: _Graph) -> _Piece:
        """Compile a graph, or take the piece of an equal graph from the cache."""
        places = {out: place for place, out in enumerate(out for call in graph.calls for out in call.outs)}
        results = [places[Ref(value)] for value in graph.outputs]
        changed = sorted(map(graph.inputs.index, graph.changed))
        key = f"{cost_key(graph.calls, self.captured.metas)} -> {results}, {changed}"
        if key not in self.pieces:
            run, rise = self._compiled(graph)
            self.pieces[key] = _Piece(run, f"{_PIECE}.{len(self.pieces)}", rise)
        return self.pieces[key]

    def _compiled(self, graph: _Graph) -> tuple[Compiled | None, int]:
        """Compile a graph and run it on random inputs: check the layouts of its results, measure what it allocates."""
        captured = self.captured
        made = Inputs(captured, captured.device)  # shares tensors that look alike, which must not be written into
        fresh = [value for value in graph.outputs if value not in dict(graph.same)]
        with torch.no_grad(), torch._C._DisableAutocast():
            tensors = [_copy(made.make(value)) for value in graph.inputs]
            del made
            changed = [value in graph.changed for value in graph.inputs]
            run = compile_function(_function(graph, fresh), tensors, changed)
            results = run(list(tensors))
            storages = {t.untyped_storage()._cdata for t in (*tensors, *results)}
            alike = all(
                TensorMeta.of(tensor) == captured.metas[value] for tensor, value in zip(results, fresh, strict=True)
            )
            if not alike or len(storages) < len(tensors) + len(results):
                return None, 0
            del results
            return run, allocated_peak(lambda: run(list(tensors)), captured.device)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with its own storage; elements of an expanded tensor share memory in the copy, too."""
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _calling(name: str, graph: _Graph) -> Task:
    """The task that calls a compiled graph."""
    same = dict(graph.same)
    fresh = tuple(Ref(value) for value in graph.outputs if value not in same)
    calls = [Call(name, (tuple(map(Ref, graph.inputs)),), (), fresh, bool(fresh))]
    calls += [Call(_SAME, (Ref(root),), (), (Ref(out),)) for out, root in graph.same]
    return Task(name, graph.inputs, graph.outputs, variant="inductor", calls=tuple(calls))


def runs_of(tasks: Sequence[Task], groups: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges (first, one past the last) of tasks of one group that may form a piece; those that cannot be fused are
    alone.
    """
    start = 0
    touched: set[int] = set()
    for index, task in enumerate(tasks):
        fusible = is_fusible(task)
        apart = groups[index] != groups[start] or not touched.isdisjoint(task.writes)
        if index > start and (not fusible or apart):
            yield start, index
            start, touched = index, set()
        touched.update((*task.reads, *task.writes))
        if not fusible:
            yield index, index + 1
            start, touched = index + 1, set()
    if start < len(tasks):
        yield start, len(tasks)


def _graph(tasks: Sequence[Task], dying: set[int]) -> _Graph:
    """The graph of some tasks; values in ``dying`` are not needed after them."""
    calls = tuple(declared(call) for task in tasks for call in task.calls)
    inputs: dict[int, None] = {}
    made: dict[int, None] = {}
    root: dict[int, int] = {}  # value -> the one whose storage it is in, where it was written in place
    for call in calls:
        inputs.update((ref.name, None) for ref in refs(call) if isinstance(ref.name, int) and ref.name not in made)
        made.update((out.name, None) for out in call.outs if out is not None and isinstance(out.name, int))
        target = target_of(call)
        if target is not None and isinstance(target.name, int):
            (out,) = call.outs
            assert out is not None and isinstance(out.name, int)
            root[out.name] = root.get(target.name, target.name)
    outputs = tuple(value for value in made if value not in dying)
    same = tuple((value, root[value]) for value in outputs if root.get(value) in inputs)
    lasting = {*dict(same).values(), *(inputs.keys() - dying)}
    return _Graph(calls, tuple(inputs), outputs, same, frozenset(lasting & written_values(tasks)))


def _function(graph: _Graph, results: Sequence[int]) -> Callable[..., list[torch.Tensor]]:
    """A graph as a function of its inputs, which it may write into."""

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        known: dict[Ref | None, Any] = {Ref(value): tensor for value, tensor in zip(graph.inputs, tensors, strict=True)}
        for call in graph.calls:
            known.update(zip(call.outs, results_of(call, known), strict=True))
        return [known[Ref(value)] for value in results]

    return function


def check_inductor(device: torch.device) -> None:
    """Whether Inductor can compile for ``device``.

    Raises:
        UsageError: a tool is missing: a C++ compiler for the CPU, Triton for a GPU.
    """
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UsageError(
                f"backend 'inductor' needs Triton for {device.type}, which PyTorch does not find; "
                "install triton, or use backend='eager'"
            )
        return
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        tried = ", ".join(filter(None, config.cpp.cxx)) or "none"
        raise UsageError(
            f"backend 'inductor' needs a C++ compiler, and none runs here (tried: {tried}); "
            "install g++, name another in the environment variable CXX, or use backend='eager'"
        ) from None


def compile_function(
    function: Callable[..., list[torch.Tensor]], like: Sequence[torch.Tensor], changed: Sequence[bool]
) -> Compiled:
    """Compile ``function`` into generated kernels. Call the result without gradients and without autocast.

    Dynamo traces nothing, and no guard is checked when the result runs: who calls it answers for shapes and strides.

    Args:
        function: of as many tensors as ``like``; may call any ATen operator, and write into its arguments.
        like: tensors of the shapes, strides, dtypes and device that it will be called with.
        changed: whether each argument is to have what the function writes into it; others may be left as they are.

    Returns:
        The compiled function. Its results have the strides that ``function`` gives them.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode()
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in like]
    with mode:
        inlined = make_fx(function, {overload(name): twin for name, twin in INLINED.items()})(*fakes)
        graph = make_fx(torch.func.functionalize(inlined), select_decomp_table())(*fakes)  # twins write in place, too
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    unused = {node for node, keeps in zip(given, changed, strict=True) if not keeps}
    for node in [node for node in graph.graph.nodes if node.target is torch.ops.aten.copy_.default]:
        if node.args[0] in unused:
            graph.graph.erase_node(node)
    end: Any = graph.graph.output_node()
    # Results for the caller keep their strides; Inductor chooses the strides of all other tensors.
    end.meta["user_visible_output_idxs"] = list(range(len(end.args[0])))
    with config.patch({"triton.cudagraphs": False}):  # a CUDA graph would keep memory of its own
        compiled: Any = compile_fx_inner(graph, fakes, is_inference=True)
    return compiled
