"""Every operator in place gives the bits of the operator whose place it takes, in all dtypes, layouts and kinds of
operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from any_schedule import MODE
from taking import error_of
from torch import nn
from torch.utils._pytree import tree_map

from monet_like.capture.captured import TensorMeta
from monet_like.capture.lower.step import capture
from monet_like.ir.program import Call, Ref
from monet_like.plan.random_schedules import random_schedule
from monet_like.runtime.operators import overload, resolve
from monet_like.variants import admitted
from monet_like.variants.in_place import BACKWARD, FORWARD, overwriting

ROWS = BACKWARD | FORWARD
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.int8)
#: Numbers that the operators take, by the names of their arguments.
NUMBERS = {
    "min_val": -1.0, "max_val": 1.0, "threshold": 0.3, "negative_slope": 0.01, "alpha": 1.0, "scale": 1.0,
    "input_scale": 1.0, "beta": 1.5, "is_result": False, "self_is_result": False, "approximate": "tanh",
}  # fmt: skip
FACTORS = (0.4, -7.3, 1e-3, 3)
#: The sums of gradients, which are added into either of them whatever the other is (`accumulate_in_place`).
SUMS = "aten.add.Tensor"


def laid_out(dtype: torch.dtype, shape: tuple[int, ...], layout: str, seed: int = 0) -> torch.Tensor:
    """Random elements of small size, some of them zero, in memory as ``layout`` says."""
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)
    if dtype.is_complex:
        tensor = tensor + 1j * torch.randn(shape, generator=generator).to(dtype)
    tensor.reshape(-1)[::7] = 0
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor[:, :1].expand(shape) if layout == "expanded" else tensor


LAYOUTS = {
    "rows": (5, 67),
    "vectors": (1024,),
    "channels_last": (2, 9, 4, 5),
    "transposed": (3, 37),
    "expanded": (4, 33),
    "number": (),
    "one": (1, 1),
}


def operands(dtype: torch.dtype, own: torch.Tensor, layout: str) -> Iterator[Any]:
    """The other operands of arithmetic: numbers, tensors that are one number, rows, and tensors of the same shape."""
    yield from FACTORS
    for other in {dtype, torch.float32, torch.float64, torch.bfloat16, torch.int64}:
        yield torch.tensor(3.37, dtype=torch.float64).to(other)
        if own.dim():
            yield laid_out(other, own.shape[-1:], "vectors", 2)
            yield laid_out(other, tuple(own.shape), "rows", 3)
            yield laid_out(other, tuple(own.shape), layout, 4)


def arguments(op: str, dtype: torch.dtype, layout: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments for an operator, made from its schema."""
    shape = LAYOUTS[layout]
    own = laid_out(dtype, shape, layout)
    if op == "monet_like.keep_where.default":
        bits = torch.randint(256, (-(-own.numel() // 8),), dtype=torch.uint8)
        yield (own, bits, own.stride()), {}
        return
    declared = overload(op)._schema.arguments
    if [argument.name for argument in declared[:2]] == ["self", "other"]:
        for other in operands(dtype, own, layout):
            if isinstance(other, torch.Tensor) and str(declared[1].type) != "Tensor":
                continue
            yield (own, other), {}
            if isinstance(other, torch.Tensor):
                yield (other, own), {}
            if any(argument.name == "alpha" for argument in declared):
                yield from (((own, other), {"alpha": alpha}) for alpha in (2, 0.3))
        return
    tensors = iter(range(9))
    made = [
        laid_out(dtype, shape, layout, next(tensors))
        if str(argument.type) == "Tensor"
        else argument.default_value
        if argument.has_default_value() and argument.default_value is not None
        else NUMBERS[argument.name]
        for argument in declared
        if not argument.kwarg_only
    ]
    yield tuple(made), {a.name: NUMBERS[a.name] for a in declared if a.kwarg_only}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor's elements, those that are not a number alike."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point():
        return tensor
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.where(tensor.isnan(), torch.nan, tensor).contiguous().view(integers[tensor.itemsize])


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.copy_(tensor) if 0 not in tensor.stride() else tensor.clone(memory_format=torch.preserve_format)


def overwritten(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Call, torch.Tensor]]:
    """Every call in place that would be offered for these arguments, with what it leaves."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    places = {id(tensor): Ref(place) for place, tensor in enumerate(tensors)}
    refs = tuple(places.get(id(arg), arg) for arg in args)
    call = Call(op, refs, tuple(kwargs.items()), (Ref("out"),))

    def meta_of(arg: Any) -> TensorMeta | None:
        return TensorMeta.of(tensors[arg.name]) if isinstance(arg, Ref) else None

    made = TensorMeta.of(resolve(op)(*args, **kwargs))
    writes = [*overwriting(call, ROWS[op], meta_of)]
    if op == SUMS and not kwargs and len(tensors) == 2:
        writes += [(refs[1], Call("aten.add_.Tensor", refs[::-1], (), (Ref("out"),)))]
    for taken, write in writes:
        if TensorMeta.of(tensors[taken.name]) == made:
            copies = {Ref(place): copy_of(tensor) for place, tensor in enumerate(tensors)}
            given, options = tree_map(lambda leaf, to=copies: to.get(leaf, leaf), (write.args, dict(write.kwargs)))
            resolve(write.op)(*given, **options)
            yield write, copies[taken]


@pytest.mark.parametrize("op", sorted(ROWS))
def test_every_form_in_place_has_the_bits_of_its_operator(op: str) -> None:
    offered = 0
    for dtype in DTYPES:
        for layout in LAYOUTS:
            for args, kwargs in arguments(op, dtype, layout):
                try:
                    expected = resolve(op)(*args, **kwargs)
                except (RuntimeError, NotImplementedError, TypeError):  # PyTorch has no such operator for these dtypes
                    continue
                for write, found in overwritten(op, args, kwargs):
                    offered += 1
                    kinds = [f"{a.dtype}{[*a.shape]}" if isinstance(a, torch.Tensor) else a for a in args]
                    assert torch.equal(bits(found), bits(expected)), (write.op, dtype, layout, kinds, kwargs)
    assert offered >= len(FLOATS)


class _Activations(nn.Module):
    """Each activation between a product and a quotient by a number, and behind a factor in float32."""

    def __init__(self) -> None:
        super().__init__()
        names = ("relu", "hardtanh", "leaky_relu", "elu", "silu", "hardswish", "hardsigmoid", "sigmoid", "tanh", "gelu")
        self.functions = [getattr(nn.functional, name) for name in (*names, "softplus", "relu6", "dropout")]
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in self.functions)
        self.register_buffer("factor", torch.tensor(0.4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, function in zip(self.layers, self.functions, strict=True):
            x = function(self.factor * (layer(x) * 1.3)) / 0.7
        return x


@pytest.mark.slow(but=["dtype0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_ways_of_a_16_bit_model_have_its_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = _Activations().to(dtype)
    model.factor = torch.tensor(0.4)
    example = (model, (torch.randn(7, 20, dtype=dtype),), {})
    captured = admitted(capture(*example[:2]), MODE)
    ways = [way for slot in captured.program.slots for way in slot if way.variant == "in_place"]
    assert all(way.overwrites is not None and way.word == "inplace" for way in ways)
    written = {way.calls[-1].op.split(".")[1] for way in ways}
    activations = ("gelu", "hardsigmoid", "hardswish", "sigmoid", "silu", "tanh")
    assert written >= {f"{name}_backward" for name in activations}
    for seed, (drop, others) in enumerate([(0.0, 1.0), (0.9, 0.5)]):
        schedule = random_schedule(captured.program, seed, drop=drop, others=others)
        assert error_of(example, captured, schedule, MODE) == 0.0
