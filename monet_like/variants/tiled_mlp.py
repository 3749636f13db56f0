"""A decoder's MLP for some of the rows at a time, so that its wide activations never exist at once.

Between the first products and the last one an MLP has several tensors of its full width, and a gradient of each. In
tiles along the rows only those of one tile exist: the forward keeps none of them, and the backward computes each tile's
again, either from the MLP's input or from the results of its first products. (Sequence tiling: Luo et al.,
Mini-Sequence Transformer, NeurIPS 2024; Bekman et al., Arctic Long Sequence Training, 2025. There the number of tiles
is fixed.)

A gate, silu(a) * b, and its gradients are one operator each in every tile (see `swiglu`).

``conv`` admits it: products of fewer rows, and sums over rows tile by tile, agree up to rounding. 16-bit gradients of
weights are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..ir.program import Call, Ref, Task
from . import linear, swiglu
from .calls import HALF, Calls, Total
from .editor import Editor, cuts, root_of
from .patterns import Operators

#: Into how many tiles the rows are cut; each is a variant of its own.
TILES = (1, 4, 16)
#: Least size of the tensors between the layers, in units of the input's. It is the same for every batch, so that
#: smaller inputs have the same program.
WIDENING = 4
_VIEW, _TURN, _SUM = "aten.view.default", "aten.t.default", "aten.sum.dim_IntList"
_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default"})
_ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "tanh")
_ROWWISE = frozenset(
    {f"aten.{name}.default" for name in _ACTIVATIONS}
    | {f"aten.{name}_backward.default" for name in (*_ACTIVATIONS, "threshold")}
    | {"aten.mul.Tensor", "aten.add.Tensor", "aten.add_.Tensor"}
)
#: Operators that can write into a part of their result.
_WRITING = _PRODUCTS | {"aten.add.Tensor", "aten.mul.Tensor"}


@dataclass(frozen=True)
class _Mlp:
    """An MLP and its gradients.

    Attributes:
        tasks: of the forward, in order; the last one is the last product.
        slots: numbers of the first slot and the one after the last.
        x, grad: the input, and the incoming gradient, as values.
        inner: values of the forward between its tasks.
        products: of these the results of products.
        between: values of the backward that only these slots read.
        of_x: the gradient of ``x`` as a value; None: not wanted.
        rows: how many there are.
        fused: the tasks, those of a gate in one.
        ways: of the slots, those of a gate's gradients in one.
    """

    tasks: tuple[Task, ...]
    slots: tuple[int, int]
    x: int
    grad: int
    inner: frozenset[int]
    products: frozenset[int]
    between: frozenset[int]
    of_x: int | None
    rows: int
    fused: tuple[Task, ...] = ()
    ways: tuple[Task, ...] = ()


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, forward and gradients in tiles; gradients become one slot, by PyTorch or in tiles."""
    if "conv" not in editor.words:
        return  # apart, PyTorch's operators need less memory: something may be run again between them
    makers = {value: task for task in editor.tasks if task.variant == "aten" for value in task.writes}
    gates = list(swiglu.gates(Operators(editor)))
    for last in editor.tasks:
        mlp = _find(editor, makers, last) if last.variant == "aten" else None
        if mlp is None:
            continue
        mlp = _with_gates(editor, mlp, gates)
        first, end = mlp.slots
        plain = editor.in_turn([ways[0] for ways in editor.slots[first:end]], mlp.between)
        ways = [plain]
        others = [_by_onednn(each) for each in editor.slots[first:end]]
        if any(way.variant != "aten" for way in others):
            name = f"{plain.name}.{linear.VARIANT}"
            ways.append(editor.in_turn(others, mlp.between, name=name, variant=linear.VARIANT, word="conv"))
        if len(mlp.ways) < end - first:
            between = mlp.between.intersection(v for way in mlp.ways for v in way.writes)
            name, variant = f"{plain.name}.{swiglu.VARIANT}", f"{swiglu.VARIANT}.backward"
            fused = editor.in_turn(mlp.ways, between, name=name, variant=variant, word="conv")
            ways.append(replace(fused, writes=plain.writes))
        for tiles in TILES:
            if tiles > 1:
                calls = _Tiles(editor, mlp, tiles).forward()
                editor.add(last, calls, last.writes, f"tiled_mlp.{tiles}", word="conv", runs=last.runs)
            for kept, name in ((frozenset[int](), "tiled_mlp"), (mlp.products, "tiled_mlp_from_products")):
                calls = _Tiles(editor, mlp, tiles).backward(kept)
                ways.append(editor.beside(plain, calls, f"{name}.{tiles}", word="conv"))
        editor.merge(first, ways, end - first)


def _with_gates(editor: Editor, mlp: _Mlp, gates: Sequence[swiglu.Gate]) -> _Mlp:
    """The MLP with its gates fused."""
    inside = [gate for gate in gates if gate.inner in mlp.inner]
    first, end = mlp.slots
    operators = Operators(editor)
    found = [made for gate in inside if (made := swiglu.gradients(operators, gate)) is not None]
    within = [made for made in found if {*made.slots} <= {*range(first, end)}]
    ways = swiglu.fused_ways([ways[0] for ways in editor.slots[first:end]], first, within)
    return replace(mlp, fused=tuple(swiglu.fused_tasks(mlp.tasks, inside)), ways=tuple(ways))


def _by_onednn(ways: list[Task]) -> Task:
    """The way of a slot by oneDNN, if there is one."""
    return next((way for way in ways if way.variant == linear.VARIANT), ways[0])


def _find(editor: Editor, makers: dict[int, Task], last: Task) -> _Mlp | None:
    """The MLP whose last product is ``last``, if nothing outside of it reads the values between its operators."""
    if last.calls[-1].op not in _PRODUCTS or len(last.writes) != 1:
        return None
    tasks: dict[str, Task] = {}
    read: set[int] = set()
    waiting = [last]
    while waiting:
        task = waiting.pop()
        if task.name in tasks:
            continue
        tasks[task.name] = task
        for value in _row_inputs(editor, task):
            maker = makers.get(value)
            inside = maker is not None and _is_rowwise(editor, maker) and value not in editor.captured.program.outputs
            if task is not last and task.calls[-1].op in _PRODUCTS:  # a first product; LoRA's are two in a row
                inside = inside and maker is not None and maker.calls[-1].op in _PRODUCTS
            if maker is not None and inside and all(t.name in tasks for t in editor.forward_readers(value)):
                waiting.append(maker)
            else:
                read.add(value)
    inputs = [v for v in read if v not in makers or makers[v].name not in tasks]  # readers may be found later
    found = tuple(task for task in editor.tasks if task.name in tasks)
    products = frozenset(t.writes[0] for t in found[:-1] if t.calls[-1].op in _PRODUCTS)
    inner = frozenset(t.writes[0] for t in found[:-1])
    if len(inputs) != 1 or not products or found[-1] is not last or products == inner:
        return None
    (x,) = inputs
    if editor.bytes_of(inner) < WIDENING * editor.bytes_of((x,)):
        return None  # the gradients of all weights at once would take what tiles save
    return _with_slots(editor, found, x, inner, products)


def _row_inputs(editor: Editor, task: Task) -> list[int]:
    """The values that a task reads which are no parameters or buffers."""
    return [v for v in task.reads if editor.values[v].kind not in ("parameter", "buffer")]


def _is_rowwise(editor: Editor, task: Task) -> bool:
    """Whether a task computes every row of its result from the same row of its inputs, by operators that are known
    here.
    """
    *views, call = task.calls
    if len(task.writes) != 1 or any(view.op not in (_VIEW, _TURN) for view in views):
        return False
    if call.op in _PRODUCTS:
        return root_of(views, call.args[-1]) not in _row_inputs(editor, task)
    shape = _elements(editor, task.writes[0])
    return call.op in _ROWWISE and all(_elements(editor, v) == shape for v in task.reads)


def _elements(editor: Editor, value: int) -> int:
    return math.prod(editor.metas[value].shape)


def _with_slots(
    editor: Editor, tasks: tuple[Task, ...], x: int, inner: frozenset[int], products: frozenset[int]
) -> _Mlp | None:
    """The MLP with the slots of its gradients, which must be adjacent."""
    first = next((k for k, ways in enumerate(editor.slots) if not inner.isdisjoint(ways[0].reads)), None)
    if first is None:
        return None
    gradients = [v for v in editor.slots[first][0].reads if editor.values[v].kind == "backward"]
    if len(gradients) != 1:
        return None
    (grad,) = gradients
    while first and _belongs(editor, editor.slots[first - 1][0], {grad}, set()):
        first -= 1  # the last product's gradients that read nothing of the forward
    known, end = {grad}, first
    while end < len(editor.slots) and _belongs(editor, editor.slots[end][0], known, {x, *inner}):
        known.update(editor.slots[end][0].writes)
        end += 1
    made = known - {grad}
    outside = [way for k, ways in enumerate(editor.slots) if not first <= k < end for way in ways]
    others = [task for task in editor.tasks if task not in tasks]
    read = {v for task in (*outside, *others) for v in task.reads} | {*editor.captured.program.gradients}
    rows = math.prod(editor.metas[x].shape[:-1])
    leaving = made & read
    sums = {v for ways in editor.slots[first:end] if _sums_rows(ways[0]) for v in ways[0].writes}
    of_x = [v for v in leaving - sums if _elements(editor, v) == _elements(editor, x)]
    if not inner.isdisjoint(read) or not made or len(of_x) > 1:
        return None
    if any(not editor.metas[v].contiguous for v in (x, grad, *inner, *made)):
        return None
    if leaving - {*of_x} - sums:
        return None
    return _Mlp(tasks, (first, end), x, grad, inner, products, frozenset(made - read), of_x[0] if of_x else None, rows)


def _sums_rows(way: Task) -> bool:
    """Whether a way makes the gradient of a weight or bias: a sum over all rows."""
    call = way.calls[-1]
    turned = {view.outs[0] for view in way.calls[:-1] if view.op == _TURN}
    return call.op == _SUM or (call.op == "aten.mm.default" and call.args[0] in turned)


def _belongs(editor: Editor, way: Task, known: set[int], forward: set[int]) -> bool:
    """Whether a slot works on the gradients that are ``known`` so far, by operators that are known here."""
    *views, call = way.calls
    if len(way.writes) != 1 or any(view.op not in (_VIEW, _TURN) for view in views):
        return False
    residents = [v for v in way.reads if editor.values[v].kind in ("parameter", "buffer")]
    if not {*way.reads} <= {*known, *forward, *residents} or known.isdisjoint(way.reads):
        return False
    if call.op == _SUM:
        return call.args[1:] == ([0], True)
    if call.op == "aten.mm.default":
        return _sums_rows(way) != bool(residents)
    return call.op in _ROWWISE and not residents


@dataclass
class _Tiles:
    """Writes the calls of one variant.

    Attributes:
        rows: whole values as matrices.
        turned: what `_arguments` has turned, by the view and the tile; None: the same for all tiles.
    """

    editor: Editor
    mlp: _Mlp
    tiles: int
    calls: Calls = field(default_factory=Calls)
    rows: dict[int, Ref] = field(default_factory=dict)
    turned: dict[tuple[Ref | None, int | None], Ref] = field(default_factory=dict)

    def forward(self) -> Calls:
        """The calls that compute the result in tiles."""
        (out,) = self.mlp.tasks[-1].writes
        self.calls.empty(self.editor.metas[out], Ref(out))
        self._rows_of(out, self.mlp.x)
        for tile, begin, end in cuts(self.mlp.rows, self.tiles):
            known = self._sliced(begin, end, self.mlp.x)
            for task in self.mlp.fused[:-1]:
                self._run(task, known, tile)
            self._run(self.mlp.fused[-1], known, tile, into=self.calls.slice(self.rows[out], 0, begin, end))
        return self.calls

    def backward(self, kept: frozenset[int]) -> Calls:
        """The calls that compute all gradients in tiles, with the values ``kept`` at hand."""
        mlp, metas = self.mlp, self.editor.metas
        needed = {v for way in mlp.ways for v in way.reads} & mlp.inner
        tasks: list[Task] = []
        for task in reversed(mlp.fused[:-1]):
            if task.writes[0] in needed and task.writes[0] not in kept:
                tasks.insert(0, task)
                needed.update({*task.reads} & mlp.inner)
        at_hand = sorted(kept & needed)
        if mlp.of_x is not None:
            self.calls.empty(metas[mlp.of_x], Ref(mlp.of_x))
        self._rows_of(mlp.x, mlp.grad, *at_hand, *([] if mlp.of_x is None else [mlp.of_x]))
        totals = {way.writes[0]: self._total(way.writes[0]) for way in mlp.ways if _sums_rows(way)}
        for tile, begin, end in cuts(self.mlp.rows, self.tiles):
            known = self._sliced(begin, end, mlp.x, mlp.grad, *at_hand)
            for task in tasks:
                self._run(task, known, tile)
            for way in mlp.ways:
                value = way.writes[0]
                if value in totals:
                    self._add_up(totals[value], way, known, tile)
                else:
                    into = self.calls.slice(self.rows[value], 0, begin, end) if value == mlp.of_x else None
                    self._run(way, known, tile, into=into)
        for total in totals.values():
            total.finish()
        return self.calls

    def _rows_of(self, *values: int) -> None:
        for value in values:
            shape = (self.mlp.rows, _elements(self.editor, value) // self.mlp.rows)
            self.rows[value] = self.calls.add(_VIEW, Ref(value), shape)

    def _sliced(self, begin: int, end: int, *values: int) -> dict[Ref, Ref]:
        return {Ref(value): self.calls.slice(self.rows[value], 0, begin, end) for value in values}

    def _arguments(self, task: Task, known: dict[Ref, Ref], tile: int) -> tuple[Any, ...]:
        """The arguments of a task's last call in this tile: views of rows are the rows themselves."""
        local: dict[Any, Any] = {}
        for view in task.calls[:-1]:
            (out,), source = view.outs, view.args[0]
            of = local.get(source) or known.get(source)
            if view.op == _VIEW:
                local[out] = of or source
                continue
            key = (out, tile if of else None)
            if key not in self.turned:
                self.turned[key] = self.calls.add(_TURN, of or source)
            local[out] = self.turned[key]
        operands = {**known, **local}
        return tuple(operands.get(arg, arg) if isinstance(arg, Ref) else arg for arg in task.calls[-1].args)

    def _run(self, task: Task, known: dict[Ref, Ref], tile: int, *, into: Ref | None = None) -> None:
        """One operator on one tile; its results are known from then on."""
        call, args = task.calls[-1], self._arguments(task, known, tile)
        op = call.op.replace("add_.", "add.")
        if into is not None and op in _WRITING:
            kwargs = (*call.kwargs, ("out", into))
            self.calls.append(Call(f"{op.rpartition('.')[0]}.out", args, kwargs, (into,)))
            return
        made = {out: self.calls.name() for out in call.outs if out}
        self.calls.append(replace(call, op=op, args=args, outs=tuple(made.values())))
        known.update(made)
        if into is not None:
            self.calls.put(made[Ref(task.writes[0])], into)

    def _total(self, value: int) -> Total:
        dtype = self.editor.metas[value].dtype
        return Total(self.calls, Ref(value), dtype, apart=self.tiles > 1 and dtype in HALF)

    def _add_up(self, total: Total, way: Task, known: dict[Ref, Ref], tile: int) -> None:
        """Add a tile's part to the gradient of a weight or bias."""
        call, args = way.calls[-1], self._arguments(way, known, tile)
        if call.op == _SUM:
            total.add_sum(call, *args)
        else:
            total.add_product(*args)
