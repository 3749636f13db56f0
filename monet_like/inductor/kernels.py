"""A joint graph as a program: each task is a kernel that writes one item and computes what Inductor does on the way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from ..capture.captured import look_of
from ..ir.program import Program, Runs, Task, Value, ValueKind
from ..runtime.operators import communicates
from .collectives import is_part, writes_of
from .in_place import with_takeovers
from .joint import NARROW, Joint, Kernel, draws, is_elementwise, is_view, readers, reads_memory
from .rewrites import is_conversion


@dataclass(frozen=True)
class Kernels:
    """A joint graph as a program.

    Attributes:
        joint: the graph.
        program: forward tasks are kernels of the forward; slots those of the backward.
        value_of: the value of every item and input; of no others.
        tasks: the kernel of every forward task; None: the effects of the forward, which run at its end.
        slots: the kernels of every slot's ways.
        order: the place of every node in the graph.
    """

    joint: Joint
    program: Program
    value_of: Mapping[fx.Node, int]
    tasks: tuple[Kernel | None, ...]
    slots: tuple[tuple[Kernel, ...], ...]
    order: Mapping[fx.Node, int]


def kernels_of(joint: Joint, static: Collection[int] = ()) -> Kernels:
    """The program of a joint graph.

    Args:
        static: places of the inputs that are parameters or buffers.
    """
    return _Builder(joint, static).build()


class _Builder:
    def __init__(self, joint: Joint, static: Collection[int]) -> None:
        self.joint, self.static = joint, static
        self.order = {node: place for place, node in enumerate(joint.graph.nodes)}
        self.values: list[Value] = []
        self.value_of: dict[fx.Node, int] = {}
        self.tasks: list[tuple[Task, Kernel | None]] = []
        self.slots: list[list[tuple[Task, Kernel]]] = []
        self.stops = tuple(
            dict.fromkeys((joint.items, joint.items - joint.narrow, joint.items - joint.narrow - joint.cheap))
        )

    def build(self) -> Kernels:
        joint = self.joint
        self._add_values()
        delayed: dict[fx.Node, list[tuple[Task, Kernel]]] = {}
        for node in joint.graph.nodes:
            if node not in joint.items or is_part(node):
                continue
            if node in joint.backward:
                ways = [self._task(node, k, place) for place, k in enumerate(self._variants(node))]
                if self._is_delayed(ways[0]) or _unconverted(node) in delayed:
                    delayed[node] = ways
                else:
                    self.slots.append(ways)
            else:
                self.tasks += [self._task(node, k, place) for place, k in enumerate(self._variants(node))]
        self._admit_inputs()
        # In the end all gradients are there: what takes a workspace besides, as convolutions may, runs before.
        for node in sorted(delayed, key=lambda node: "convolution" not in _unconverted(node).name):
            self.slots.append(delayed[node])
        outputs = self._bases(node for node in joint.forward_outputs if node is not None)
        if joint.effects:
            outputs.append(self._add_effects())
        returned = self._bases(node for node in joint.backward_outputs if node is not None)
        gradients = [node for node in returned if self.values[node].kind == "backward"]
        late = [v for v in returned if self.values[v].kind != "backward"]
        if late:
            nodes = tuple(node for node, v in self.value_of.items() if v in late)
            task = Task("returned", tuple(late), ())
            self.slots.append([(task, Kernel(None, nodes, (), ()))])
        read = {v for ways in self.slots for v in ways[0][0].reads}
        tangents = [v for v, value in enumerate(self.values) if value.name.startswith("tangents") and v in read]
        program = Program(
            tuple(self.values),
            tuple(task for task, _ in self.tasks),
            tuple(tuple(task for task, _ in ways) for ways in self.slots),
            tuple(dict.fromkeys(v for v in outputs if self.values[v].kind == "forward")),
            tuple(tangents),
            tuple(
                dict.fromkeys(v for v in gradients if v in tangents or not self.values[v].name.startswith("tangents"))
            ),
        )
        slots = tuple(tuple(k for _, k in ways) for ways in self.slots)
        program, tasks = with_takeovers(program, self.value_of, [k for _, k in self.tasks], slots)
        program.check()
        return Kernels(joint, program, self.value_of, tasks, slots, self.order)

    def _add_values(self) -> None:
        inputs = 0
        for node in self.joint.graph.nodes:
            kind: ValueKind
            if node.op == "placeholder":
                kind = "backward" if node in self.joint.backward else "input"
                if kind == "input":
                    kind = "parameter" if inputs in self.static else "input"
                    inputs += 1
            elif node in self.joint.items and node in writes_of(node):
                kind = "backward" if node in self.joint.backward else "forward"
            else:
                continue
            value = node.meta.get("val")
            spec = look_of(value) if isinstance(value, torch.Tensor) else ""
            self.value_of[node] = len(self.values)
            self.values.append(Value(node.name, self.joint.bytes_of(node), kind, spec))

    def _admit_inputs(self) -> None:
        """Let the forward make what a task that it may run reads, also if the backward alone needs both, and the first
        is no smaller.
        """
        read = set[int]()
        for place, (task, kernel) in reversed(list(enumerate(self.tasks))):
            if task.runs == "again" and not read.isdisjoint(task.writes):
                task = replace(task, runs="both")
                self.tasks[place] = task, kernel
            if task.runs != "again" and task.variant == "aten":
                read.update(task.reads)

    def _is_delayed(self, way: tuple[Task, Kernel]) -> bool:
        """Whether it makes gradients that nobody reads from much less than they take: then it runs when all else has.

        Such is the weight gradient of a linear layer with more features than the batch has rows.
        """
        task, kernel = way
        if not all(_is_returned(node) for node in kernel.writes) or (kernel.root and communicates(kernel.root.target)):
            return False
        given = sum(self.values[v].bytes for v in task.reads if self.values[v].kind != "parameter")
        return NARROW * given <= sum(self.values[v].bytes for v in task.writes)

    def _variants(self, root: fx.Node) -> list[Kernel]:
        """The kernels that may write an item: they read what is there, or compute more of it anew."""
        found: dict[tuple[fx.Node, ...], Kernel] = {}
        for stop in self.stops[:1] if reads_memory(root) else self.stops:
            reads, inlined = walk(root, stop, self.order)
            found.setdefault(reads, Kernel(root, reads, inlined, writes_of(root)))
        return list(found.values())

    def _task(self, root: fx.Node, kernel: Kernel, place: int) -> tuple[Task, Kernel]:
        joint = self.joint
        reads = tuple(self.value_of[node] for node in kernel.reads if node in self.value_of)
        writes = tuple(self.value_of[node] for node in kernel.writes)
        runs: Runs = "both"
        touched = joint.changed.intersection((*kernel.reads, *kernel.inlined))
        if draws(root) or communicates(root.target) or touched:
            runs = "first"
        elif root not in joint.forward and root not in joint.backward:
            given = sum(self.values[v].bytes for v in reads if self.values[v].kind == "forward")
            if given <= sum(self.values[v].bytes for v in writes):
                runs = "again"
        name = f"{root.name}.{place}" if place else root.name
        variant = "aten" if not place else "fused"
        return Task(name, reads, writes, _key(kernel), variant, runs=runs), kernel

    def _bases(self, nodes: Iterable[fx.Node]) -> list[int]:
        """The values in whose memory nodes lie."""
        found = []
        for node in nodes:
            while node not in self.value_of and is_view(node):
                node = node.all_input_nodes[0]
            if node in self.value_of:
                found.append(self.value_of[node])
        return list(dict.fromkeys(found))

    def _add_effects(self) -> int:
        """The effects of the forward: a task that makes a value of no bytes."""
        read: dict[int, None] = {}
        for node in self.joint.effects:
            reads = (node,) if node in self.value_of else walk(node, self.joint.items, self.order)[0]
            read.update((self.value_of[n], None) for n in reads if n in self.value_of)
        done = len(self.values)
        self.values.append(Value("effects", 0, "forward"))
        self.tasks.append((Task("effects", tuple(read), (done,), runs="first"), None))
        return done


def _unconverted(node: fx.Node) -> fx.Node:
    """The node that makes the gradient whose strides a node converts; of any other node itself."""
    if not is_conversion(node):
        return node
    made: Any = node.args[0]
    while is_part(made) or is_view(made):
        made = made.args[0]
    return cast(fx.Node, made)


def _is_returned(node: fx.Node) -> bool:
    """Whether nobody reads a gradient but the parameter that it is of."""
    return all(user.op == "output" or (is_conversion(user) and _is_returned(user)) for user in readers(node))


def _key(kernel: Kernel) -> str:
    """The same for kernels that cost the same."""

    def shown(node: fx.Node) -> str:
        tensors = node.meta.get("val")
        return f"{tensors.dtype}{tuple(tensors.shape)}{tensors.stride()}" if isinstance(tensors, torch.Tensor) else ""

    root = kernel.root
    assert root is not None
    literals = "" if is_elementwise(root) else str(fx.map_arg((root.args, root.kwargs), shown))
    return " ".join([str(root.target), *map(shown, kernel.reads), "->", *map(shown, kernel.writes), literals])


def walk(
    root: fx.Node, stop: frozenset[fx.Node], order: Mapping[fx.Node, int]
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """What a kernel for ``root`` reads, and the nodes that it computes on the way.

    Args:
        root: an item.
        stop: the items that it reads from memory; it computes all others anew.
        order: the place of every node in the graph.

    Returns:
        Items and inputs, and inlined nodes, each in the order of the graph.
    """
    read, inlined = set[fx.Node](), set[fx.Node]()
    pending = list(root.all_input_nodes)
    while pending:
        node = pending.pop()
        if node in read or node in inlined:
            continue
        if node.op == "placeholder" or node in stop:
            read.add(node)
        else:
            inlined.add(node)
            pending += node.all_input_nodes
    return tuple(sorted(read, key=order.__getitem__)), tuple(sorted(inlined, key=order.__getitem__))
