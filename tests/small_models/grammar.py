"""What operations small models are made of, and the code of each.

A kind is a function from arguments and the values that it reads to lines of code. It picks its arguments by name among
options, whose first is the default: drawing picks any, and a description that lacks an argument means the default. So a
description becomes simpler by losing arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

import torch


class UnfitError(Exception):
    """An operation does not apply to what it would read."""


@dataclass(frozen=True)
class Value:
    """What is known of a value when the model is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def dim(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    def __str__(self) -> str:
        return self.name


class Arguments:
    """Arguments by name; those that are not given are drawn, or take their default where nothing draws."""

    def __init__(self, given: Mapping[str, Any], rng: Random | None = None) -> None:
        self.given, self.rng = given, rng
        self.taken: dict[str, Any] = dict(given)

    def pick(self, name: str, *options: Any) -> Any:
        """One of the options; the first is the default."""
        if name in self.given:
            return self.given[name]
        if self.rng is None:
            return options[0]
        found = self.rng.choice(options)
        if found != options[0]:
            self.taken[name] = found
        return found

    def seldom(self, name: str, share: float = 0.1) -> bool:
        """True with this probability."""
        if name in self.given:
            return bool(self.given[name])
        found = self.rng is not None and self.rng.random() < share
        if found:
            self.taken[name] = True
        return found


@dataclass(frozen=True)
class Text:
    """Code of one operation; ``{out}`` stands for its name and ``{m}`` for its module.

    Attributes:
        forward, init, between: lines of the forward, of ``__init__``, and of what happens between two steps.
        module: expression that makes the module; "" without one.
        outs: endings of the names of the values that it makes.
        under: expression of a context that the forward's lines run in.
        frozen: lines that run whenever the model is switched to training.
    """

    forward: tuple[str, ...] = ()
    module: str = ""
    init: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    outs: tuple[str, ...] = ("",)
    under: str = ""
    frozen: tuple[str, ...] = ()

    def names(self, name: str) -> list[str]:
        """Names of the values that an operation of this name makes."""
        return [name + ending for ending in self.outs]

    def filled(self, op: Any, chosen: Arguments, before: Sequence[Any]) -> Text:
        """With names in place, and with what every module and every operation may have."""
        init, frozen, module = list(self.init), [], f"self.{op.name}"
        if self.module:
            alike = [other.name for other in before if other.kind == op.kind]
            shared = chosen.pick("like", None, None, None, None, *alike) if alike else chosen.given.get("like")
            tied = chosen.pick("tie", None, None, None, None, None, *alike) if alike else chosen.given.get("tie")
            init.insert(0, f"{module} = self.{shared}" if shared else f"{module} = {self.module}")
            if tied and not shared:
                init.append(f"assert {module}.weight.shape == self.{tied}.weight.shape")
                init.append(f"{module}.weight = self.{tied}.weight")
            if chosen.seldom("frozen", 0.06):
                init.append(f"{module}.requires_grad_(False)")
            if chosen.given.get("evaluated") or (op.kind.endswith("norm") and chosen.seldom("evaluated", 0.15)):
                init.append(f"{module}.eval()")
                frozen.append(f"{module}.eval()")
            hook = chosen.pick("hook", *[None] * 14, *HOOKS)
            if hook:
                init.append(HOOKS[hook])
        under = self.under
        if op.kind not in ("input", "result"):
            under = UNDER[chosen.pick("under", *[""] * 24, "bfloat16", "off")]

        def put(lines: Sequence[str]) -> tuple[str, ...]:
            return tuple(line.replace("{out}", op.name).replace("{m}", module) for line in lines)

        return replace(
            self, forward=put(self.forward), init=put(init), between=put(self.between), under=under, frozen=put(frozen)
        )


UNDER = {
    "": "",
    "bfloat16": 'torch.autocast("cpu", torch.bfloat16)',
    "off": 'torch.autocast("cpu", enabled=False)',
}
HOOKS = {
    "pre": "{m}.register_forward_pre_hook(shift_input)",
    "forward": "{m}.register_forward_hook(halve_output)",
    "backward": "{m}.register_full_backward_hook(scale_gradient)",
    "parameter": "next({m}.parameters()).register_hook(add_tenth)",
}


@dataclass(frozen=True)
class Kind:
    """A kind of operation.

    Attributes:
        write: from arguments and what it reads to its code.
        reads: how many values it reads.
        weight: how often it is drawn.
    """

    name: str
    write: Callable[..., Text]
    reads: int
    weight: float


KINDS: dict[str, Kind] = {}


def kind(reads: int = 1, weight: float = 1.0) -> Callable[[Callable[..., Text]], Callable[..., Text]]:
    """Register a kind under its function's name."""

    def register(function: Callable[..., Text]) -> Callable[..., Text]:
        name = function.__name__.rstrip("_")
        KINDS[name] = Kind(name, function, reads, weight)
        return function

    return register


def need(condition: bool, reason: str = "shape") -> None:
    """Give up where an operation does not apply."""
    if not condition:
        raise UnfitError(reason)


def line(expression: str) -> Text:
    """An operation of one expression."""
    return Text((f"{{out}} = {expression}",))


def layer(module: str, call: str) -> Text:
    """An operation with a module; ``call`` is what it is called with."""
    return Text((f"{{out}} = {{m}}({call})",), module)


def divisor(a: Arguments, name: str, number: int) -> int:
    """A number of groups."""
    fitting = [d for d in (1, 2, 4, number) if number % d == 0]
    wanted = int(a.pick(name, *fitting))
    need(number % wanted == 0)
    return wanted


# Inputs and results


@kind(reads=0, weight=0)
def input_(a: Arguments) -> Text:
    return Text()


RESULTS = {
    "one": "{0}",
    "tuple": "{all},",
    "list": "[{all}]",
    "dict": "{{{named}}}",
    "named": "Named({0}, {rest})",
    "nested": '{{"a": ({0}, None), "b": [{rest}], "n": 3, "t": True}}',
    "twice": "({0}, {all},)",
    "with input": "({all}, {input},)",
    "dataclass": "Record({0}, {rest})",
}


@kind(reads=1, weight=0)
def result(a: Arguments, *values: Value) -> Text:
    """What the model returns; the loss uses those whose number is not in ``ignored``."""
    seldom = ("with input", "dataclass")
    form = a.pick("form", *["one"] * 9, *["tuple", "list", "dict", "named", "nested", "twice"] * 3, *seldom)
    if len(values) > 1 and form == "one":
        form = "tuple"
    names = [v.name for v in values]
    text = RESULTS[form].format(
        *names, all=", ".join(names), rest=", ".join(names[1:2]) or names[0], input="x0",
        named=", ".join(f'"{n}": {n}' for n in names),
    )  # fmt: skip
    return Text((f"return {text}",), outs=())


# Layers with parameters


@kind(weight=3)
def linear(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2)
    out = a.pick("out", x.shape[-1], 4, 8, 1, 16)
    bias = a.pick("bias", True, True, False)
    weight = a.pick("weight", "", "", "", "", "weight_norm", "spectral_norm", "functional")
    module = f"nn.Linear({x.shape[-1]}, {out}, bias={bias})"
    if weight in ("weight_norm", "spectral_norm"):
        module = f"nn.utils.parametrizations.{weight}({module})"
    if weight == "functional":
        return Text((f"{{out}} = F.linear({x}, {{m}}.weight, {{m}}.bias)",), module)
    return layer(module, x.name)


@kind(weight=3)
def conv(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim in (3, 4, 5))
    channels, least = x.shape[1], min(x.shape[2:])
    kernel = a.pick("kernel", *(k for k in (1, 3, 2) if k <= least))
    groups = divisor(a, "groups", channels)
    out = groups * a.pick("out", 1, 2, 4) if groups > 1 else a.pick("out", channels, 4, 8, 2, 1)
    options = f"stride={a.pick('stride', 1, 1, 2)}, padding={a.pick('padding', 0, 1, kernel // 2)}, groups={groups}"
    options += f", bias={a.pick('bias', True, False)}"
    mode = a.pick("fill", *["zeros"] * 6, "reflect", "circular", "replicate")
    if mode != "zeros":
        options += f", padding_mode={mode!r}"
    if kernel > 1 and a.seldom("dilated"):
        options += ", dilation=2"
    return layer(f"nn.Conv{x.dim - 2}d({channels}, {out}, {kernel}, {options})", x.name)


@kind(weight=1.5)
def conv_transpose(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim in (3, 4, 5))
    channels = x.shape[1]
    groups = divisor(a, "groups", channels)
    options = f"stride={a.pick('stride', 1, 2)}, groups={groups}, bias={a.pick('bias', True, False)}"
    out = groups * a.pick("out", 1, 2)
    return layer(f"nn.ConvTranspose{x.dim - 2}d({channels}, {out}, {a.pick('kernel', 1, 2, 3)}, {options})", x.name)


@kind(weight=2)
def embedding(a: Arguments, x: Value) -> Text:
    need(x.dtype == torch.int64 and x.dim <= 3)
    options = a.pick("options", "", "", "", "padding_idx=1", "scale_grad_by_freq=True", "max_norm=0.5")
    return layer(f"nn.Embedding(5, {a.pick('width', 4, 8, 1)}{', ' + options if options else ''})", x.name)


@kind(weight=0.5)
def embedding_bag(a: Arguments, x: Value) -> Text:
    need(x.dtype == torch.int64 and x.dim == 2)
    return layer(f"nn.EmbeddingBag(5, 4, mode={a.pick('mode', 'sum', 'mean', 'max')!r})", x.name)


@kind(weight=0.7)
def one_hot(a: Arguments, x: Value) -> Text:
    need(x.dtype == torch.int64 and x.dim <= 3)
    return line(f"F.one_hot({x}, 5).float()")


@kind(reads=2, weight=0.5)
def bilinear(a: Arguments, x: Value, y: Value) -> Text:
    need(x.is_float and y.is_float and x.shape[:-1] == y.shape[:-1] and x.dim >= 2)
    return layer(f"nn.Bilinear({x.shape[-1]}, {y.shape[-1]}, {a.pick('out', 2, 4)})", f"{x}, {y}")


@kind(weight=1.5)
def cell(a: Arguments, x: Value) -> Text:
    """A recurrent cell, for one or two steps."""
    need(x.is_float and x.dim == 2)
    width = a.pick("width", x.shape[1], 4, 8)
    name = a.pick("cell", "RNNCell", "GRUCell", "LSTMCell")
    module = f"nn.{name}({x.shape[1]}, {width}, bias={a.pick('bias', True, False)})"
    lines = [f"{{out}} = {{m}}({x})"]
    lines += [f"{{out}} = {{m}}({x}, {{out}})"] * (a.pick("steps", 1, 2) - 1)
    if name == "LSTMCell":
        lines.append("{out}, {out}_state = {out}")
    return Text(tuple(lines), module)


@kind(weight=1)
def recurrent(a: Arguments, x: Value) -> Text:
    """A recurrent net over a sequence."""
    need(x.is_float and x.dim == 3 and x.shape[1] <= 6)
    name = a.pick("net", "RNN", "GRU", "GRU", "LSTM")
    layers = a.pick("layers", 1, 2)
    options = (
        f"num_layers={layers}, batch_first={a.pick('batch_first', True, False)}, "
        f"bidirectional={a.pick('both', False, True)}"
    )
    if layers > 1 and a.seldom("dropout", 0.4):
        options += ", dropout=0.5"
    take = a.pick("take", "[0]", "[0]", "state")
    after = "[0]" if take == "[0]" else "[1]" + ("[0]" if name == "LSTM" else "") + ".mean(0)"
    return Text((f"{{out}} = {{m}}({x}){after}",), f"nn.{name}({x.shape[2]}, {a.pick('width', 4, 3)}, {options})")


@kind(weight=1)
def attention(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim == 3)
    heads = divisor(a, "heads", x.shape[2])
    options = f"batch_first={a.pick('batch_first', True, False)}, dropout={a.pick('dropout', 0.0, 0.2)}"
    options += f", bias={a.pick('bias', True, False)}"
    asked = f"need_weights={a.pick('need_weights', False, True)}"
    return Text(
        (f"{{out}} = {{m}}({x}, {x}, {x}, {asked})[0]",), f"nn.MultiheadAttention({x.shape[2]}, {heads}, {options})"
    )


@kind(weight=0.6)
def encoder(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim == 3)
    options = f"dropout={a.pick('dropout', 0.0, 0.1)}, norm_first={a.pick('norm_first', False, True)}, batch_first=True"
    options += f", activation={a.pick('activation', 'relu', 'gelu')!r}"
    return layer(f"nn.TransformerEncoderLayer({x.shape[2]}, {divisor(a, 'heads', x.shape[2])}, 8, {options})", x.name)


@kind(weight=1)
def dot_product_attention(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim in (3, 4) and x.shape[-1] >= 1)
    options = f"is_causal={a.pick('causal', False, True)}, dropout_p={a.pick('dropout', 0.0, 0.0, 0.3)}"
    key = a.pick("key", f"{x}", f"2 * {x}", f"{x}.flip(-2)")
    return line(f"F.scaled_dot_product_attention({x}, {key}, {x}, {options})")


@kind(weight=1)
def own_parameter(a: Arguments, x: Value) -> Text:
    """A parameter that the model itself has."""
    need(x.is_float and x.dim >= 1)
    uses = (
        "{x} * {p}",
        "{x} + {p}",
        "{x} * {p}.softmax(0)",
        "{x} * {p}.view(1, -1)[0]",
        "torch.addcmul({p}, {x}, {p})",
    )
    text = a.pick("use", *uses).format(x=x.name, p="self.{out}_p")
    return replace(line(text), init=(f"self.{{out}}_p = nn.Parameter(torch.linspace(0.5, 1.5, {x.shape[-1]}))",))


# Normalisations


@kind(weight=4)
def batch_norm(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim in (2, 3, 4, 5) and x.shape[0] * prod(x.shape[2:]) > 1)
    options = f"momentum={a.pick('momentum', 0.1, 0.1, 0.5, None)}, affine={a.pick('affine', True, True, False)}"
    options += f", track_running_stats={a.pick('track', True, True, True, False)}"
    return layer(f"nn.BatchNorm{max(1, x.dim - 2)}d({x.shape[1]}, {options})", x.name)


@kind(weight=1.5)
def layer_norm(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2)
    last = a.pick("last", 1, 1, 2)
    need(x.dim > last)
    options = a.pick("options", "", "", "elementwise_affine=False", "bias=False")
    return layer(f"nn.LayerNorm({list(x.shape[-last:])}{', ' + options if options else ''})", x.name)


@kind(weight=1.5)
def group_norm(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2 and x.shape[0] * prod(x.shape[1:]) > x.shape[0] * x.shape[1] // 2)
    groups = divisor(a, "groups", x.shape[1])
    return layer(f"nn.GroupNorm({groups}, {x.shape[1]}, affine={a.pick('affine', True, False)})", x.name)


@kind(weight=1)
def instance_norm(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim in (3, 4, 5) and prod(x.shape[2:]) > 1)
    options = f"affine={a.pick('affine', False, True)}, track_running_stats={a.pick('track', False, True)}"
    return layer(f"nn.InstanceNorm{x.dim - 2}d({x.shape[1]}, {options})", x.name)


@kind(weight=1)
def rms_norm(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2)
    return layer(f"nn.RMSNorm({x.shape[-1]}, elementwise_affine={a.pick('affine', True, False)})", x.name)


@kind(weight=0.5)
def other_norm(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 3)
    return line(a.pick("norm", "F.normalize({x}, dim=1)", "F.local_response_norm({x}, 2)").format(x=x.name))


# Activations, dropouts and noise

IN_PLACE = {
    "relu": "ReLU()", "leaky_relu": "LeakyReLU(0.1)", "elu": "ELU()", "silu": "SiLU()", "hardswish": "Hardswish()",
    "relu6": "ReLU6()", "hardtanh": "Hardtanh()", "celu": "CELU()", "selu": "SELU()", "mish": "Mish()",
    "hardsigmoid": "Hardsigmoid()", "threshold": "Threshold(0.1, 0.2)", "rrelu": "RReLU()",
}  # fmt: skip
OTHERS = (
    "GELU()", "GELU('tanh')", "Tanh()", "Sigmoid()", "Softplus()", "Softsign()", "LogSigmoid()", "Tanhshrink()",
    "Hardshrink()", "Softshrink()", "PReLU()", "Softmax(-1)", "LogSoftmax(1)", "Softmin(1)",
)  # fmt: skip


@kind(weight=5)
def activation(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 1)
    name = a.pick("name", "relu", "relu", "relu", *IN_PLACE)
    form = a.pick("form", "function", "module", "in place", "in place", "method")
    if form == "method":
        methods = {"relu": "relu_()", "hardtanh": "clamp_(-1, 1)"}
        return Text((f"{{out}} = {x}.{methods.get(name, 'sigmoid_()')}",))
    arguments = "0.1, 0.2, " if name == "threshold" else ""
    if form == "function":
        training = ", training=self.training" if name == "rrelu" else ""
        return line(f"F.{name}({x}, {arguments}".rstrip(", ") + f"{training})")
    return layer(f"nn.{_in_place(IN_PLACE[name]) if form == 'in place' else IN_PLACE[name]}", x.name)


def _in_place(module: str) -> str:
    return module[:-1] + (", " if module[-2] != "(" else "") + "inplace=True)"


@kind(weight=3)
def other_activation(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2)
    return layer(f"nn.{a.pick('module', *OTHERS)}", x.name)


@kind(weight=0.7)
def gated(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2 and x.shape[-1] % 2 == 0)
    return line(f"F.glu({x}, -1)")


@kind(weight=3.5)
def dropout(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2)
    names = ["Dropout", "Dropout", "Dropout", "AlphaDropout", "FeatureAlphaDropout"]
    names += {3: ["Dropout1d"], 4: ["Dropout2d"], 5: ["Dropout3d"]}.get(x.dim, [])
    name, share = a.pick("name", *names), a.pick("p", 0.5, 0.1, 0.3, 0.0, 1.0)
    between = ("model.{out}.p = 0.2 + 0.1 * step",) if a.seldom("changes") else ()
    text = layer(f"nn.{name}({share}{', inplace=True' if a.seldom('in_place', 0.25) else ''})", x.name)
    return replace(text, between=between)


@kind(weight=1.2)
def noise(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 1)
    options = (
        "{x} + 0.1 * torch.randn_like({x})", "{x} * torch.rand({s})", "{x} * torch.bernoulli({x}.detach().sigmoid())",
        "F.dropout({x}, 0.3)", "{x} + torch.randint(0, 3, {s})", "{x} * (torch.rand_like({x}) > 0.4)",
        "{x} + torch.empty_like({x}).normal_(0, 0.1)", "F.gumbel_softmax({x}, dim=-1)", "{x}[torch.randperm({n})]",
        "torch.normal({x}, 0.1)", "{x} * torch.empty({s}).exponential_()", "{x} + torch.poisson({x}.detach().abs())",
        "F.dropout({x}, 0.5, training=self.training, inplace=False)", "{x} * torch.empty({s}).bernoulli_(0.5)",
    )  # fmt: skip
    return line(a.pick("expression", *options).format(x=x.name, s=list(x.shape), n=x.shape[0]))


# Pooling, resizing, shapes


@kind(weight=2)
def pool(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim in (3, 4, 5))
    d, least = x.dim - 2, min(x.shape[2:])
    name = a.pick("pool", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "LPPool")
    if name.startswith("Adaptive"):
        return layer(f"nn.{name}{d}d({a.pick('out', 1, 2)})", x.name)
    need(least >= 2)
    size = a.pick("size", 2, 3)
    if name == "LPPool":
        return layer(f"nn.LPPool{d}d(2, {size})", x.name)
    options = f", stride={a.pick('stride', 2, 1)}, padding={a.pick('padding', 0, 1)}"
    if name == "AvgPool" and a.seldom("excluding", 0.3):
        options += ", count_include_pad=False"
    return layer(f"nn.{name}{d}d({size}{options})", x.name)


@kind(weight=0.8)
def unpooled(a: Arguments, x: Value) -> Text:
    """Max-pooling with indices, and back."""
    need(x.is_float and x.dim == 4 and min(x.shape[2:]) >= 2)
    down = f"{{out}}_p, {{out}}_i = F.max_pool2d({x}, 2, return_indices=True)"
    return Text((down, "{out} = F.max_unpool2d({out}_p, {out}_i, 2)"))


@kind(weight=1)
def resize(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim == 4)
    options = (
        "F.interpolate({x}, scale_factor=2)", "F.interpolate({x}, size=(3, 3), mode='bilinear')",
        "F.interpolate({x}, scale_factor=2, mode='bicubic', align_corners=True)",
        "F.interpolate({x}, scale_factor=2, mode='area')",
        "F.pixel_unshuffle({x}, 2)", "F.pixel_shuffle({x}, 2)", "F.unfold({x}, 2)", "F.channel_shuffle({x}, 2)",
        "F.grid_sample({x}, torch.zeros({n}, 2, 2, 2) + 0.3, align_corners=False)",
    )  # fmt: skip
    return line(a.pick("expression", *options).format(x=x.name, n=x.shape[0]))


@kind(weight=0.8)
def pad(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 3)
    mode = a.pick("mode", "constant", "reflect", "replicate", "circular")
    need(mode == "constant" or x.dim in (3, 4))
    amounts = [1] * (2 * min(2, x.dim - 2)) if mode != "constant" else a.pick("amounts", [1, 1], [1, 0, 0, 2], [-1, 0])
    return line(f"F.pad({x}, {amounts}, mode={mode!r})")


VIEWS = (
    "{x}.transpose(0, -1)", "{x}.transpose(1, -1)", "{x}.permute({reverse})", "{x}.flatten(1)", "{x}.reshape({n}, -1)",
    "{x}.unsqueeze(1)", "{x}.unsqueeze(-1)", "{x}.squeeze()", "{x}.squeeze(1)", "{x}.squeeze(-1)", "{x}[..., ::2]",
    "{x}[1:]", "{x}[:, :1]", "{x}[:, -1]", "{x}[..., 0]", "{x}[:1]", "{x}.narrow(0, 0, 1)", "{x}.select(1, 0)",
    "{x}.unsqueeze(1).expand(-1, 2, {ones})", "{x}[:1].expand_as({x})", "{x}.movedim(0, -1)",
    "{x}.diagonal(dim1=0, dim2=-1)", "{x}.unfold(-1, 1, 1)", "{x}.view(-1)", "{x}.view({n}, 1, -1)", "{x}.mT",
    "{x}.expand({n}, {ones})", "{x}.view_as({x})", "{x}.contiguous()", "{x}.as_strided([2], [1])", "{x}.T",
    "{x}.flatten(0, 1)", "{x}.unflatten(-1, (-1, 1))", "{x}[None]", "{x}.swapaxes(0, 1)", "{x}[..., None, :]",
    "{x}.real", "{x}.squeeze().unsqueeze(0)", "{x}.broadcast_to([2, {shape}])",
)  # fmt: skip
COPIES = (
    "{x}.clone()", "{x}.repeat(2, {ones})", "{x}.repeat_interleave(2, 0)", "{x}.flip(-1)", "{x}.roll(1, 0)",
    "{x}[[0, 0]]", "{x}.index_select(0, torch.arange({n}))", "{x}[torch.arange({n}) % 2]", "{x}.tril()", "{x}.triu(1)",
    "{x}.rot90(1, [0, 1])", "{x}.contiguous(memory_format=torch.channels_last)",
    "{x}.to(memory_format=torch.channels_last)", "{x}.transpose(0, 1).contiguous()", "{x}.gather(-1, {x}.argsort(-1))",
    "{x}.take_along_dim({x}.argmax(-1, keepdim=True), -1)", "{x}.bfloat16().float()", "{x}.double().float()",
    "{x}.masked_fill({x} > 0.5, 0.25)", "torch.where({x} > 0, {x}, 0.1 * {x})", "{x}[{x}.argmax(0)[0].flatten()[:1]]",
    "{x}.take(torch.tensor([0]))", "{x}.new_zeros(2, 2) + {x}.mean()", "{x}.detach() + 0.5 * {x}", "{x} * {x}.detach()",
)  # fmt: skip


def _format(expression: str, x: Value) -> str:
    return expression.format(
        x=x.name, n=x.shape[0], ones=", ".join(["-1" if "expand" in expression else "1"] * (x.dim - 1)),
        reverse=", ".join(str(d) for d in reversed(range(x.dim))), shape=", ".join(map(str, x.shape)),
    )  # fmt: skip


@kind(weight=5)
def view(a: Arguments, x: Value) -> Text:
    need(x.dim >= 2)
    return line(_format(a.pick("expression", *VIEWS), x))


@kind(weight=2.5)
def rearranged(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2)
    return line(_format(a.pick("expression", *COPIES), x))


@kind(weight=2)
def parts_(a: Arguments, x: Value) -> Text:
    """Parts of a tensor, of which two are used."""
    need(x.dim >= 2)
    dim = a.pick("dim", 1, 0, -1)
    need(x.shape[dim] >= 2)
    rest = x.shape[dim] - 1
    options = (
        f"{x}.chunk(2, {dim})[:2]", f"{x}.split([1, {rest}], {dim})", f"{x}.unbind({dim})[:2]",
        f"{x}.tensor_split(2, {dim})", f"{x}.unbind({dim})[-2:]", f"{x}.split(1, {dim})[:2]",
    )  # fmt: skip
    return Text((f"{{out}}a, {{out}}b = {options[a.pick('how', *range(len(options)))]}",), outs=("a", "b"))


@kind(reads=2, weight=2)
def joined(a: Arguments, x: Value, y: Value) -> Text:
    need(x.dtype == y.dtype and x.dim == y.dim >= 1)
    options = (
        "torch.cat([{x}, {y}], 1)", "torch.cat([{x}, {y}], 0)", "torch.cat([{x}, {y}, {x}], -1)",
        "torch.stack([{x}, {y}])",
        "torch.stack([{x}, {y}], -1)", "torch.hstack(({x}, {y}))", "torch.block_diag({x}, {y})",
    )  # fmt: skip
    return line(a.pick("expression", *options).format(x=x, y=y))


# Arithmetic


@kind(reads=2, weight=5)
def binary(a: Arguments, x: Value, y: Value) -> Text:
    need(x.is_float and y.is_float)
    options = (
        "{x} + {y}", "{x} * {y}", "{x} - {y}", "{x} / ({y}.abs() + 1)", "torch.maximum({x}, {y})",
        "torch.minimum({x}, {y})", "torch.add({x}, {y}, alpha=0.5)", "torch.lerp({x}, {y}, 0.3)", "{x} + {y}",
        "{x} * {y}.sigmoid()", "torch.where({x} > {y}, {x}, {y})", "torch.atan2({x}, {y} + 2)",
        "torch.addcdiv({x}, {x}, {y}.abs() + 1)", "F.smooth_l1_loss({x}, {y}, reduction='none')",
        "F.mse_loss({x}, {y})", "torch.logaddexp({x}, {y})", "torch.hypot({x}, {y} + 1)",
        "torch.cosine_similarity({x}, {y}, -1)", "torch.cdist({x}, {y})",
    )  # fmt: skip
    return line(a.pick("expression", *options).format(x=x, y=y))


@kind(reads=2, weight=2)
def product(a: Arguments, x: Value, y: Value) -> Text:
    need(x.is_float and y.is_float and x.dim >= 2 and y.dim >= 2)
    options = (
        "{x} @ {y}.transpose(-1, -2)", "{x} @ {y}", "torch.einsum('i...,i...->i', {x}, {y})",
        "torch.einsum('...i,...i->...', {x}, {y})",
        "{x}.transpose(-1, -2) @ {y}", "torch.tensordot({x}, {y}, 1)", "torch.baddbmm({x}, {x}, {y}.transpose(1, 2))",
    )  # fmt: skip
    return line(a.pick("expression", *options).format(x=x, y=y))


UNARY = (
    "2 * {x}", "{x} + 1", "{x}.exp()", "{x}.abs()", "{x}.square()", "({x}.abs() + 0.1).sqrt()", "{x}.sin()",
    "({x}.abs() + 1).log()", "{x} ** 3", "{x}.clamp(-0.5, 0.5)", "{x}.clamp(min=0)", "({x}.abs() + 1).rsqrt()", "-{x}",
    "1 / (1 + {x}.exp())", "{x}.sign() * {x}", "{x}.round() + {x}", "{x}.cumsum(-1)", "{x}.cumprod(1)", "{x}.erf()",
    "{x}.expm1()", "{x}.sort(-1)[0]", "{x}.softmax(1)", "{x} - {x}.mean(1, keepdim=True)",
    "{x} / {x}.norm(dim=-1, keepdim=True).clamp_min(0.1)", "{x} - {x}.amax(-1, keepdim=True)", "{x}.nan_to_num()",
    "({x}.abs() + 0.5).pow(0.5)", "{x} % 0.7", "{x} * {x}", "{x} + {x}.sum(0, keepdim=True)", "{x}.logcumsumexp(1)",
    "{x}.type_as({x})", "{x}.cos() * torch.pi", "2 ** {x}", "{x} * torch.arange({last})",
    "{x} + torch.linspace(0, 1, {last})", "{x} * torch.ones({last}).tril()", "{x} @ torch.eye({last})",
    "{x} * torch.tensor(0.5)", "{x} + {x}.std(-1, keepdim=True, unbiased=False)", "{x}.float()",
    "torch.special.expit({x})", "torch.sinc({x})",
)  # fmt: skip
REDUCTIONS = (
    "{x}.mean(-1)", "{x}.sum(1)", "{x}.mean()", "{x}.sum(0)", "{x}.amax(-1)", "{x}.max(1)[0]", "{x}.max()",
    "{x}.logsumexp(-1)", "{x}.var(1, unbiased=False)", "{x}.norm(dim=1)", "{x}.mean((0, -1))", "{x}.prod(-1)",
    "{x}.median(-1)[0]", "{x}.topk(1, -1)[0]", "{x}.min(-1, keepdim=True)[0]", "{x}.std()", "{x}.norm()",
    "{x}.amin((0, 1))", "{x}.sum(-1, keepdim=True)", "{x}.kthvalue(1, -1)[0]", "{x}.abs().mean(1, keepdim=True)",
    "torch.var_mean({x}, 1)[1]",
)  # fmt: skip


@kind(weight=5)
def unary(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2)
    return line(a.pick("expression", *UNARY).format(x=x.name, last=x.shape[-1]))


@kind(weight=2)
def reduced(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 2)
    return line(a.pick("expression", *REDUCTIONS).format(x=x.name))


@kind(weight=0.6)
def classified(a: Arguments, x: Value) -> Text:
    """A loss that the model itself computes."""
    need(x.is_float and x.dim == 2 and x.shape[1] >= 2)
    target = f"torch.arange({x.shape[0]}) % {x.shape[1]}"
    return line(f"F.cross_entropy({x}, {target}, label_smoothing={a.pick('smoothing', 0.0, 0.1)})")


@kind(weight=0.7)
def logged(a: Arguments, x: Value) -> Text:
    """An entropy with elements that are zero: its gradient has infinities, unless nothing uses it."""
    need(x.is_float and x.dim >= 2)
    return Text((f"{{out}} = {x}.relu()", "{out} = -({out} * {out}.log()).nan_to_num().sum()"))


# Writes in place


@kind(weight=3)
def written(a: Arguments, x: Value) -> Text:
    """A copy, or the tensor itself, that is written into."""
    need(x.is_float and x.dim >= 2)
    statements = (
        "{o} += 1", "{o} *= 2", "{o}[0] = 0", "{o}[:, 0] += {o}[:, -1].clone()", "{o}.mul_({o}.detach().sigmoid())",
        "{o}.clamp_(-1, 1)", "{o}.add_({o}.mean())", "{o}[{o} > 1] = 0.5", "{o}.masked_fill_({o} > 0.5, 0)",
        "{o}.index_add_(0, torch.zeros(1, dtype=torch.long), {o}[:1].clone())", "{o}[..., -1].mul_(3)", "{o}.zero_()",
        "{o}[torch.arange(1)] = {o}[:1] * 2", "{o}.copy_({o}.flip(-1))", "{o}.transpose(0, 1)[0].add_(1)",
        "{o}.tanh_()", "{o}.sub_(0.5).div_(2)", "{o}.view(-1)[::2].neg_()", "{o}.normal_()", "{o}.fill_(0.5)",
        "F.dropout({o}, 0.5, inplace=True)", "{o}.exp_()",
    )  # fmt: skip
    begin = a.pick("of", "{x}.clone()", "{x} * 1", "{x} + 0.5", "{x}", "{x}.clone()[:]", "torch.zeros_like({x}) + {x}")
    statement = a.pick("statement", *statements)
    return Text((f"{{out}} = {begin.format(x=x.name)}", statement.replace("{o}", "{out}")))


# Custom functions and hooks


@kind(weight=2)
def custom(a: Arguments, x: Value) -> Text:
    need(x.is_float and x.dim >= 1)
    options = (
        "Cubed.apply({x}, 0.3)", "Noisy.apply({x})", "Reversed.apply({x}, 0.5)", "Straight.apply({x})",
        "Doubled.apply({x} * 1)", "NoisyBackward.apply({x}, {x} + 1)",
    )  # fmt: skip
    return line(a.pick("function", *options).format(x=x))


@kind(weight=1)
def custom_pair(a: Arguments, x: Value) -> Text:
    """A custom function with two results."""
    need(x.is_float and x.dim >= 1)
    return Text((f"{{out}}a, {{out}}b = Halves.apply({x})",), outs=("a", "b"))


@kind(weight=1.5)
def hooked(a: Arguments, x: Value) -> Text:
    """A tensor's hook, registered in the forward."""
    need(x.is_float and x.requires_grad)
    hooks = (
        "lambda g: 2 * g", "add_tenth", "lambda g: g.clamp(-0.1, 0.1)", "lambda g: None",
        "lambda g: g * torch.sigmoid({out}.detach())",
    )  # fmt: skip
    return Text((f"{{out}} = {x} * 1", f"{{out}}.register_hook({a.pick('hook', *hooks)})"))


# State, numbers and control


@kind(weight=1.5)
def buffered(a: Arguments, x: Value) -> Text:
    """A buffer that the forward updates and reads."""
    need(x.is_float and x.dim >= 2)
    start = f"self.register_buffer('{{out}}_b', torch.zeros({x.shape[-1]}))"
    mean = f"{x}.detach().flatten(0, -2).mean(0)"
    updates = (
        f"self.{{out}}_b.mul_(0.9).add_({mean}, alpha=0.1)", f"self.{{out}}_b.copy_({mean})", "self.{out}_b += 1",
        "self.{out}_b[0] += 1", f"self.{{out}}_b = 0.9 * self.{{out}}_b + {mean}",
    )  # fmt: skip
    update, use = a.pick("update", *updates[:4], *updates), f"{{out}} = {x} - self.{{out}}_b"
    lines = (
        (update, use) if a.pick("reads", "after", "before") == "after" else (use.replace("_b", "_b.clone()"), update)
    )
    return Text(lines, init=(start,))


@kind(weight=1.5)
def scaled(a: Arguments, x: Value) -> Text:
    """A number that the forward reads and that may change between steps."""
    need(x.is_float and x.dim >= 1)
    places = {
        "attribute": ("self.{out}_n", "self.{out}_n = 0.5", "model.{out}_n = 0.5 + step"),
        "namespace": ("self.{out}_c.n", "self.{out}_c = SimpleNamespace(n=0.5)", "model.{out}_c.n = 0.5 + step"),
        "dict": ("self.{out}_d['n']", "self.{out}_d = {'n': 0.5}", "model.{out}_d['n'] = 0.5 + step"),
        "list": ("self.{out}_l[0]", "self.{out}_l = [0.5]", "model.{out}_l[0] = 0.5 + step"),
        "default": ("getattr(self, '{out}_g', 0.5)", "pass", "model.{out}_g = 0.5 + step"),
        "class": (
            "type(self).{out}_k",
            "type(self).{out}_k = 0.5",
            "type(getattr(model, '_model', model)).{out}_k = 0.5 + step",
        ),
    }
    read, init, change = places[a.pick("place", *places)]
    return Text((f"{{out}} = {x} * {read}",), init=(init,), between=(change,) if a.seldom("changes", 0.4) else ())


@kind(weight=0.8)
def branched(a: Arguments, x: Value) -> Text:
    """Python decides."""
    need(x.is_float and x.dim >= 1)
    tests = (
        "self.training", "{x}.shape[0] > 2", "torch.is_grad_enabled()", "self.{out}_f", "random.random() < 0.5",
        "{x}.requires_grad", "{x}.sum() > 0", "{x}.is_contiguous()",
    )  # fmt: skip
    test = a.pick("test", *tests[:4], *tests).replace("{x}", x.name)
    between = ("model.{out}_f = bool(step % 2)",) if "_f" in test and a.seldom("changes", 0.4) else ()
    return Text((f"{{out}} = {x} * 2 if {test} else {x} + 1",), init=("self.{out}_f = True",), between=between)


@kind(weight=0.8)
def constant(a: Arguments, x: Value) -> Text:
    """A tensor that is neither a parameter nor a buffer."""
    need(x.is_float and x.dim >= 2)
    numbers = [0.5 + 0.25 * i for i in range(x.shape[-1])]
    options = (
        "torch.tensor({n})", "self.{out}_t", "self.{out}_h[0]", "torch.tensor({n}).exp()", "torch.as_tensor({n})",
        "{x}.new_tensor({n})",
    )  # fmt: skip
    read = a.pick("made", *options).replace("{n}", str(numbers)).replace("{x}", x.name)
    init = ()
    if "self" in read:
        init = (f"self.{{out}}_t = torch.tensor({numbers})", "self.{out}_h = [self.{out}_t]")
    return Text((f"{{out}} = {x} * {read}",), init=init)


@kind(weight=0.6)
def aside(a: Arguments, x: Value) -> Text:
    """Something that a forward does beside computing."""
    need(x.is_float)
    options = (
        "self.{out}_s = {x}.detach()", "self.{out}_s = {x}.shape[0]", "with torch.no_grad(): {x}.mean()",
        "assert {x}.dim() >= 0",
    )  # fmt: skip
    statement = a.pick("statement", *options).replace("{x}", x.name)
    return Text((statement, f"{{out}} = {x} + 0.25"))


@kind(weight=0.6)
def without_gradient(a: Arguments, x: Value) -> Text:
    need(x.is_float)
    return Text((f"with torch.no_grad(): {{out}}_n = {x}.sigmoid()", f"{{out}} = {x} * {{out}}_n"))


@kind(weight=0.5)
def checkpointed(a: Arguments, x: Value) -> Text:
    """PyTorch's own checkpointing around a module."""
    need(x.is_float and x.dim >= 2)
    module = f"nn.Sequential(nn.Linear({x.shape[-1]}, 4), nn.Dropout({a.pick('p', 0.0, 0.5)}), nn.Tanh())"
    return Text((f"{{out}} = torch.utils.checkpoint.checkpoint({{m}}, {x}, use_reentrant=False)",), module)
