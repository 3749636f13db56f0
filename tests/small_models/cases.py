"""Descriptions of small models as plain data, and the code that they stand for."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import nn

from . import parts
from .grammar import KINDS, Arguments, Text, UnfitError, Value

#: More elements than this has no value of a small model.
MOST_ELEMENTS = 6000
#: Functions of torch that make a tensor on the CPU unless they are told where.
MAKERS = frozenset((
    "arange", "as_tensor", "empty", "eye", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
    "zeros",
))  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One operation of a model.

    Attributes:
        name: of the value that it makes; values of one that makes several end in a letter.
        kind: a name in `KINDS`.
        reads: names of values.
        arguments: choices that differ from the kind's defaults.
    """

    name: str
    kind: str
    reads: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes:
        ops: inputs first, the result last.
        mode: of the schedule.
        budget: plain, 70%, 45%, smallest, or random: a valid schedule that nobody planned.
        behaviour: of the trainer, a name in `BEHAVIOURS`.
        autocast: of the calls: "" or bfloat16.
        dtype: of the model and its inputs: float32 or float64.
        seed: of weights, inputs and noise.
        device: where it is trained; weights and inputs are drawn on the CPU, so they are the same everywhere.
    """

    ops: tuple[Op, ...]
    mode: str = "normal"
    budget: str = "plain"
    behaviour: str = "ordinary"
    autocast: str = ""
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of its operations, and ``kind.argument`` for each choice that is no default."""
        chosen = {f"{op.kind}.{name}" for op in self.ops for name in op.arguments}
        return frozenset(op.kind for op in self.ops) | chosen

    @property
    def takes_unknown_memory(self) -> bool:
        """Whether hooks of parameters make tensors, which no schedule knows of, or memory depends on values."""
        by_values = (op.kind == "embedding_bag" and op.arguments.get("mode") == "max" for op in self.ops)
        return any(by_values) or any(op.arguments.get("hook") == "parameter" for op in self.ops)

    @cached_property
    def source(self) -> str:
        """The model as Python code: class ``Net`` and function ``between``."""
        writer = Writer()
        for op in self.ops:
            writer.add(op)
        return writer.source() if self.device == "cpu" else _on(self.device, writer.source())

    def model(self) -> nn.Module:
        """A new model, the same each time."""
        namespace: dict[str, Any] = {"__name__": "small_model"}
        exec(compile(self.source, "<small model>", "exec"), namespace)
        torch.manual_seed(self.seed)
        made = namespace["Net"]()
        made.to(self.device, getattr(torch, self.dtype))
        made.__dict__["between"] = namespace["between"]
        return made.train()

    def inputs(self, step: int, fewer: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of one step, the same each time; ``fewer`` samples than described."""
        args, kwargs = [], {}
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        for op in self.ops:
            if op.kind == "input":
                made = make_input(op, generator, getattr(torch, self.dtype), fewer, self.device)
                if op.arguments.get("keyword"):
                    kwargs[op.name] = made
                else:
                    args.append(made)
        return tuple(args), kwargs


def _on(device: str, source: str) -> str:
    """Code whose tensors are made on a device, and whose autocast is that device's."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=attr)) if attr in MAKERS:
                node.keywords.append(ast.keyword("device", ast.Constant(device)))
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr="autocast")):
                node.args[0] = ast.Constant(device)
    return ast.unparse(tree) + "\n"


def make_input(
    op: Op, generator: torch.Generator, dtype: torch.dtype, fewer: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """The tensor of an ``input``."""
    chosen = Arguments(op.arguments)
    shape = tuple(op.arguments["shape"])
    shape = (shape[0] - fewer, *shape[1:])
    if op.arguments.get("dtype") == "int64":
        return torch.randint(0, 5, shape, generator=generator).to(device)
    layout = chosen.pick("layout", "plain", "last", "transposed", "strided", "expanded")

    def drawn(*extents: int) -> torch.Tensor:
        return torch.randn(*extents, generator=generator, dtype=torch.float64).to(device, dtype)

    if layout == "last" and len(shape) in (4, 5):
        made = drawn(*shape).to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    elif layout == "transposed":
        made = drawn(*reversed(shape)).permute(*reversed(range(len(shape))))
    elif layout == "strided":
        made = drawn(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif layout == "expanded":
        made = drawn(1, *shape[1:]).expand(shape)
    else:
        made = drawn(*shape)
    return made.detach().requires_grad_(bool(op.arguments.get("requires_grad")))


class Writer:
    """Writes a model's code one operation after the other, and runs each at once: so shapes are known."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.texts: list[Text] = []
        self.space: dict[str, Any] = {name: getattr(parts, name) for name in parts.__all__}
        self.space["self"] = nn.Module()
        self.read: set[str] = set()

    def value(self, name: str) -> Value:
        """What is known of a value."""
        if name not in self.space:
            raise UnfitError(f"there is no {name}")
        tensor = self.space[name]
        return Value(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def values(self) -> list[Value]:
        """All values so far."""
        return [self.value(name) for op, text in zip(self.ops, self.texts, strict=True) for name in text.names(op.name)]

    def add(self, op: Op, rng: Random | None = None) -> Op:
        """Write an operation.

        Args:
            op: its arguments may lack some, which are drawn with ``rng`` or else take their defaults.

        Returns:
            The operation with the arguments that were drawn.

        Raises:
            UnfitError: it does not apply to what it reads.
        """
        kind = KINDS[op.kind]
        chosen = Arguments(op.arguments, rng)
        reads = [self.value(name) for name in op.reads]
        text = kind.write(chosen, *reads).filled(op, chosen, self.ops)
        op = replace(op, arguments=chosen.taken)
        before = dict(self.space)
        try:
            if op.kind == "input":
                generator = torch.Generator().manual_seed(0)
                self.space[op.name] = make_input(op, generator, torch.float32)
            else:
                self._run(text)
            made = [self.space[name] for name in text.names(op.name)]
            if op.kind != "result" and not all(
                isinstance(t, torch.Tensor) and 0 < t.numel() <= MOST_ELEMENTS for t in made
            ):
                raise UnfitError("no small tensor")
        except Exception as error:
            self.space = before
            raise UnfitError(str(error)) from None
        self.ops.append(op)
        self.texts.append(text)
        self.read.update(op.reads)
        return op

    def _run(self, text: Text) -> None:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if text.under:
                stack.enter_context(eval(text.under, self.space))
            for line in text.init:
                exec(line, self.space)
            for line in text.forward:
                if not line.startswith("return"):
                    exec(line, self.space)

    def source(self) -> str:
        """The code so far."""
        names = [
            op.name + (" = None" if op.arguments.get("keyword") else "")
            for op in sorted(self.ops, key=lambda op: bool(op.arguments.get("keyword")))
            if op.kind == "input"
        ]
        lines = ["from small_models.parts import *", "", "class Net(nn.Module):"]
        lines += ["    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for text in self.texts for line in text.init]
        frozen = [line for text in self.texts for line in text.frozen]
        if frozen:
            lines += ["    def train(self, mode=True):", "        super().train(mode)"]
            lines += [*(f"        {line}" for line in frozen), "        return self"]
        lines += ["", f"    def forward(self, {', '.join(names)}):"]
        under = ""
        for text in self.texts:
            if text.under and text.under != under and text.forward:
                lines.append(f"        with {text.under}:")
            if text.forward:
                under = text.under
            lines += [f"        {'    ' if under else ''}{line}" for line in text.forward]
        between = [line for text in self.texts for line in text.between]
        lines += ["", "def between(model, step):", *(f"    {line}" for line in between or ["pass"])]
        return "\n".join(lines) + "\n"
