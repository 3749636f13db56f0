"""Patterns: a function and its gradients as PyTorch's operators, and the places in a program that compute just these.

A pattern is recorded from a plain Python function, by autograd with its gradients, on tensors without memory that have
the program's shapes and dtypes. So it has the literals and casts that the program must have.

    def norm(x, weight, *, eps):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    pattern = record(norm, (("x", shape, dtype), ("weight", shape[-1:], dtype)), "rsqrt", of=("x", "weight"), eps=ANY)
    found = Operators(editor).match(pattern, task)

Operators agree in name, literals, and the values, views, shapes and dtypes of their operands. Factors and terms may
stand in either order, and an input may be any view of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.program import Ref, Task
from ..runtime.operators import overload
from .editor import Editor
from .rows import name_of

#: Stands for any float among the options of a recorded function; a match has its value under this name.
ANY = 0.7390851332151607
CAST = "_to_copy"
_IN_EITHER_ORDER = ("mul", "add")
#: Views that keep the elements and their order.
_RESHAPING = tuple(f"aten.{name}.default" for name in ("view", "expand", "unsqueeze", "alias", "detach"))
_TURN = "aten.t.default"

#: The name, shape and dtype of an input.
Input = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Seen:
    """An operand.

    Attributes:
        value: of the program; in a pattern the name of an input, or a number. If it is seen through a view that does
            more than reshape: a tuple of that, the view's operator and arguments, and the number of its result.
        shape, dtype: as the operator sees it.
        ref: the argument of the program's call.
    """

    value: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    ref: Ref | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Operator:
    """One operator: of a pattern, or the last call of a task or slot.

    Attributes:
        op: its name, without overload and without the mark of the in-place form.
        args: operands as `Seen`, and literals.
        outs: the values of its results; None: not wanted.
        task: the task, or the first way of the slot.
        slot: the number of the slot; None: a forward task.
    """

    op: str
    args: tuple[Any, ...]
    outs: tuple[Any, ...]
    task: Task | None = None
    slot: int | None = None

    @property
    def values(self) -> list[Any]:
        """The values that it reads and writes."""
        return [*(root_of_view(arg.value) for arg in self.args if isinstance(arg, Seen)), *self.outs]


@dataclass(frozen=True)
class Pattern:
    """A recorded function: its operators, the root first and each beside one before it, and values of its results.

    ``gradients`` are values, too, of the inputs' gradients, in their order.
    """

    operators: tuple[Operator, ...]
    results: tuple[Any, ...]
    gradients: tuple[Any, ...]


@dataclass(frozen=True)
class Match:
    """Where a program computes what a pattern says.

    Attributes:
        values: of the program, for those of the pattern; for `ANY` the float in its place.
        refs: the operands that are the pattern's inputs, as the first operator that reads them has them.
        tasks, slots: forward tasks and first ways; the numbers of the slots, in order.
        results, gradients: the values that are the pattern's.
    """

    values: Mapping[Any, Any]
    refs: Mapping[Any, Ref]
    tasks: tuple[Task, ...]
    slots: tuple[int, ...]
    results: tuple[int, ...]
    gradients: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    """Notes the operators that run; views are parts of their operands."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self._values: dict[int, tuple[Any, torch.Tensor]] = {}  # with the tensor, so that no address is used twice
        for name, tensor in inputs.items():
            self.note(tensor, name)

    def note(self, tensor: torch.Tensor, value: Any) -> Any:
        """Let a tensor be a value: the tensor itself, and its storage, since autograd unpacks saved results as new
        tensors.
        """
        self._values[id(tensor)] = value, tensor
        self._values.setdefault(tensor.untyped_storage()._cdata, (value, tensor))
        return value

    def value(self, tensor: torch.Tensor) -> Any:
        """The value that a tensor is."""
        known = self._values.get(id(tensor)) or self._values[tensor.untyped_storage()._cdata]
        return known[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, op = func(*args, **(kwargs or {})), str(func)
        several = made if isinstance(made, tuple | list) else (made,)
        if func.is_view:
            for number, part in enumerate(several):
                self.note(part, _through(self.value(args[0]), op, args[1:], number))
            return made
        seen = [Seen(self.value(a), tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        first = len(self.operators) * 10
        outs = tuple(self.note(part, first + number) for number, part in enumerate(several))
        self.operators.append(Operator(name_of(op), _arguments(op, seen, kwargs or {}), outs))
        return made


@lru_cache(512)
def record(
    function: Callable[..., Any], inputs: tuple[Input, ...], root: str, of: tuple[str, ...] = (), **options: Any
) -> Pattern:
    """The pattern of a function of tensors by name, with options that are no tensors.

    Args:
        root: the operator with which a match begins, such as ``rsqrt``.
        of: the inputs whose gradients are a part of the pattern; none: the forward alone. The incoming gradients of the
            results are further inputs, ``grad0``, ``grad1``, …
    """
    with torch.enable_grad(), torch._C._DisableAutocast():
        tensors = {n: torch.empty(s, dtype=d, device="meta", requires_grad=n in of) for n, s, d in inputs}
        recorder = _Recorder(tensors)
        with recorder:
            made = function(**tensors, **options)
        made = made if isinstance(made, tuple) else (made,)
        gradients: Sequence[torch.Tensor] = ()
        if of:
            grads = [torch.empty(out.shape, dtype=out.dtype, device="meta") for out in made]
            for number, grad in enumerate(grads):
                recorder.note(grad, f"grad{number}")
            with recorder:
                gradients = torch.autograd.grad(made, [tensors[name] for name in of], grads)
    results, found = (tuple(root_of_view(recorder.value(t)) for t in some) for some in (made, gradients))
    return Pattern(_connected(recorder.operators, root), results, found)


def _connected(operators: Sequence[Operator], root: str) -> tuple[Operator, ...]:
    """The operators from the root on, each beside one before it; those of which most is known come first."""
    left, order, known = list(operators), list[Operator](), set[Any]()

    def rank(each: Operator) -> tuple[bool, int]:
        return not known.isdisjoint(each.outs), sum(value in known for value in each.values)

    while left:
        order.append(max(left, key=rank) if order else next(each for each in left if each.op == root))
        left.remove(order[-1])
        known.update(order[-1].values)
    return tuple(order)


def _through(value: Any, op: str, args: Any, number: int) -> Any:
    if op == _TURN and isinstance(value, tuple) and value[1] == _TURN:
        return value[0]
    return value if op in _RESHAPING else (value, op, tuple(args), number)


def root_of_view(value: Any) -> Any:
    """The value without its views."""
    return root_of_view(value[0]) if isinstance(value, tuple) else value


def _arguments(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments in one form: dimensions from the first, casts of any shape with their dtype alone."""
    if name_of(op) == CAST:
        return (replace(args[0], shape=()), kwargs.get("dtype"))
    rank = len(args[0].shape) if args and isinstance(args[0], Seen) else 0
    plain = (sorted(d % rank for d in a) if rank and _is_dimensions(a) else a for a in args)
    return (*plain, *(pair for pair in sorted(kwargs.items()) if pair[1] is not None))


def _is_dimensions(argument: Any) -> bool:
    """Whether an argument is a list of numbers, and not of values, as indices are."""
    return isinstance(argument, list | tuple) and all(isinstance(each, int) for each in argument)


class Operators:
    """PyTorch's own operators of a program, by the values that they read and write."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        program = editor.captured.program
        self.ways = [ways[0] for ways in editor.slots]
        self.kept = {*program.gradients, *program.tangents, *program.outputs}
        self.readers: dict[int, list[tuple[Task, int | None]]] = {}
        self.writers: dict[int, tuple[Task, int | None]] = {}
        own = [(task, None) for task in editor.tasks if task.variant == "aten"]
        for task, slot in (*own, *((way, slot) for slot, way in enumerate(self.ways))):
            self.writers.update(dict.fromkeys(task.writes, (task, slot)))
            for value in task.reads:
                self.readers.setdefault(value, []).append((task, slot))
        self._known: dict[int, Operator | None] = {}

    def operator(self, task: Task, slot: int | None = None) -> Operator | None:
        """A task as an operator; None if it has several."""
        if id(task) not in self._known:
            self._known[id(task)] = self._parsed(task, slot)
        return self._known[id(task)]

    def maker(self, value: Any, *ops: str) -> Operator | None:
        """The operator that makes a value, if it is one of ``ops``."""
        found = self.operator(*self.writers[value]) if isinstance(value, int) and value in self.writers else None
        return found if found is not None and found.op in ops else None

    def _parsed(self, task: Task, slot: int | None) -> Operator | None:
        if not task.calls or not all(call.op.startswith("aten.") for call in task.calls):
            return None
        known: dict[Any, tuple[Any, torch.Tensor]] = {}  # values and tensors without memory

        def operand(arg: Any) -> Any:
            if not isinstance(arg, Ref):
                return arg
            if arg not in known:
                meta = self.editor.metas[int(arg.name)]
                known[arg] = arg.name, torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            value, tensor = known[arg]
            return Seen(value, tuple(tensor.shape), tensor.dtype, arg)

        *views, call = task.calls
        for view in views:
            function, source = overload(view.op), operand(view.args[0])
            if not function.is_view:
                return None
            made = function(known[source.ref][1], *view.args[1:], **dict(view.kwargs))
            for number, (out, part) in enumerate(zip(view.outs, made if view.unpack else (made,), strict=True)):
                known[out] = _through(source.value, view.op, view.args[1:], number), part
        outs = tuple(None if out is None else out.name for out in call.outs)
        args = _arguments(call.op, [operand(arg) for arg in call.args], dict(call.kwargs))
        return Operator(name_of(call.op), args, outs, task, slot)

    def before(self, task: Task, *ops: str) -> list[Operator]:
        """The operators that make the first operand of a task, the first operand of that one, and so on; none if others
        do.
        """
        chain = [self.operator(task)]
        for op in ops:
            seen = chain[-1].args[0] if chain[-1] is not None and chain[-1].args else None
            chain.append(self.maker(seen.value, *op.split("|")) if isinstance(seen, Seen) else None)
        found = [each for each in chain[1:] if each is not None]
        return found if len(found) == len(ops) else []

    def match(self, pattern: Pattern, root: Task) -> Match | None:
        """The place whose root is this forward task; None if it is another pattern."""
        for values, refs, found in self._matches(pattern, (root, None), {}, {}, ()):
            slots = sorted(each.slot for each in found if each.slot is not None)
            tasks = tuple(each.task for each in found if each.task is not None)
            results, gradients = (tuple(values[v] for v in of) for of in (pattern.results, pattern.gradients))
            return Match(values, refs, tasks, tuple(slots), results, gradients)
        return None

    def _matches(
        self, pattern: Pattern, root: Any, values: Any, refs: Any, found: tuple[Operator, ...]
    ) -> Iterator[Any]:
        """The matches that begin with these operators."""
        if len(found) == len(pattern.operators):
            yield values, refs, found
            return
        wanted = pattern.operators[len(found)]
        made, read = ([values[v] for v in some if v in values] for some in (wanted.outs, wanted.values))
        places = self.readers.get(root_of_view(read[0]), []) if read else [root]
        for place in [self.writers[v] for v in made[:1] if v in self.writers] if made else places:
            operator = self.operator(*place)
            if operator is None or operator.op != wanted.op or operator in found:
                continue
            first, rest = operator.args[:2], operator.args[2:]
            for order in (first, first[::-1]) if operator.op in _IN_EITHER_ORDER else (first,):
                more, operands = dict(values), dict(refs)
                if _agree(wanted, (*order, *rest), operator.outs, more, operands):
                    yield from self._matches(pattern, root, more, operands, (*found, operator))

    def alone(self, found: Match) -> bool:
        """Whether nothing else reads the forward values between a match's operators, but for casts of its inputs.

        Slots of its gradients may read them; if it has none, others, too.
        """
        inputs = {root_of_view(found.values[name]) for name in found.refs}
        made = {v for t in found.tasks for v in t.writes if CAST not in t.calls[-1].op or inputs.isdisjoint(t.reads)}
        between = {v for v in made - {*found.results, *found.gradients} if self.editor.values[v].kind == "forward"}
        readers = [(task, slot) for v in between for task, slot in self.readers.get(v, ()) if task.runs != "again"]
        others = {slot for task, slot in readers if task not in found.tasks}
        return between.isdisjoint(self.kept) and not (others if found.slots else others & {None})

    def with_casts(self, found: Match, grad: str) -> tuple[Ref, tuple[int, ...]]:
        """An incoming gradient and the slots; casts of it right before them, for them alone, are among these."""
        slots, ref, value = found.slots, found.refs[grad], found.values[grad]
        while (cast := self.maker(value, CAST)) is not None and cast.slot == slots[0] - 1:
            if not {slot for _, slot in self.readers[value]} <= {*slots}:
                break
            slots, ref, value = (cast.slot, *slots), cast.args[0].ref, cast.args[0].value
        return ref, slots

    def escapes(self, slots: Sequence[int], results: Sequence[int]) -> bool:
        """Whether anything else reads the values between some slots, which are all but their results."""
        inner = {value for slot in slots for value in self.ways[slot].writes} - {*results}
        outside = {slot for value in inner for _, slot in self.readers.get(value, ())} - {*slots}
        return bool(outside) or not inner.isdisjoint(self.kept)

    def in_turn(self, slots: Sequence[int], results: tuple[int, ...]) -> Task | None:
        """One way that does adjacent slots in turn; None if they are not, or others read the values between them."""
        if [*slots] != [*range(slots[0], slots[0] + len(slots))] or self.escapes(slots, results):
            return None
        own = [self.ways[slot] for slot in slots]
        inner = {value for way in own for value in way.writes} - {*results}
        taken = [way.overwrites for way in own if way.overwrites is not None and way.overwrites not in inner]
        metas = self.editor.metas
        if taken and metas[taken[0]].storage_bytes != metas[results[0]].storage_bytes:
            return None
        plain = self.editor.in_turn(own, inner, **({"overwrites": taken[0]} if taken else {}))
        return replace(plain, writes=results)  # the tensor that is overwritten becomes the first of them


def _agree(wanted: Operator, args: Sequence[Any], outs: Sequence[Any], values: dict[Any, Any], refs: Any) -> bool:
    """Whether arguments and results of the program's are a pattern's, as far as is known; then their
    values are noted.
    """
    if len(args) != len(wanted.args):
        return False
    pairs = [(one, other) for one, other in zip(wanted.outs, outs, strict=False) if other is not None]
    for one, other in zip(wanted.args, args, strict=True):
        if isinstance(one, Seen) and isinstance(other, Seen) and (one.shape, one.dtype) == (other.shape, other.dtype):
            mine, its = one.value, other.value
            while isinstance(mine, tuple) and isinstance(its, tuple) and mine[1:] == its[1:]:
                mine, its = mine[0], its[0]
            if isinstance(mine, str):
                refs.setdefault(mine, other.ref)
            elif isinstance(mine, tuple) or isinstance(its, tuple):
                return False
            pairs.append((mine, its))
        elif one == ANY and isinstance(other, float):
            pairs.append((one, other))
        elif isinstance(one, Seen) or one != other:
            return False
    return all(values.setdefault(one, other) == other for one, other in pairs)
