"""LoRA of a Llama of Hugging Face, as its users train it, beside plans of blocks: python -m benchmarks.decoder_steps

Measured on the device that is here: the peak of a step (everything that is allocated, weights and inputs included), its
median time, and what a plan had predicted. The contenders:

* *plain*: Transformers and PEFT as they are; *checkpoint*: ``gradient_checkpointing_enable()``;
* *Liger*: all of its kernels (RMS norm, rotary positions, SwiGLU, head and loss in one), with checkpointing and
  without;
* *compiled*: ``torch.compile`` of each layer, and the same under ``activation_memory_budget``;
* *planned*: ``auto_schedule(model, blocks=layers)`` for each budget, with Liger's loss as well, since the loss of long
  texts is most of what does not lie in the layers, and with ``backend="inductor"``;
* with ``--weights``, frozen weights on the host: *streamed* by ``auto_schedule(weights="auto")``; and, checkpointed,
  *CPUOffloadPolicy*, each layer by ``fully_shard`` in one process, and *swapped*, a layer's weights come when it runs,
  as scripts do it by hand.

The step is forward and backward; adapters of rank 16 are on all linear layers of the blocks, weights are bfloat16.
*off*: adapters' gradients against plain's, all together, relative, in the 2-norm; bfloat16 rounds, and sums are made in
other orders. With ``--exact`` also against the same step in float32, plain's too: what is as near to it as plain is not
less right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor, nn

import monet_like
from benchmarks.rows import markdown_table, write_rows
from benchmarks.worker import apart, emptied, seconds_of
from monet_like.files import write_atomically
from monet_like.ir.units import format_bytes
from monet_like.models.adapters import ADAPTED
from monet_like.models.decoders import SHAPES, Shape
from monet_like.profile.devices import device_name
from monet_like.profile.measure import allocated_peak
from monet_like.replay.verify.steps import resident_bytes

#: A decoder that a CPU runs in seconds.
TINY = Shape(width=64, blocks=3, heads=4, groups=2, hidden=160, vocabulary=512)
RANK = 16
#: For the schedules of each kind of block.
PLAN_SECONDS = 10.0


@dataclass(frozen=True)
class Setting:
    """What is trained on which device."""

    shape: Shape
    batch: int
    length: int
    device: torch.device

    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, self.shape.vocabulary, (self.batch, self.length), generator=generator)
        return drawn.to(self.device)

    def build(self, patch: Callable[[nn.Module], None] = lambda model: None) -> nn.Module:
        """The model with adapters; ``patch`` changes it before it gets them. Equal seeds make equal weights."""
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = self.shape
        config = LlamaConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.hidden,
            num_hidden_layers=shape.blocks, num_attention_heads=shape.heads, num_key_value_heads=shape.groups,
            max_position_embeddings=self.length, tie_word_embeddings=shape.tied, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        with self.device:
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
            patch(model)
            adapters = LoraConfig(r=RANK, target_modules=list(ADAPTED), task_type="CAUSAL_LM", init_lora_weights=False)
            return get_peft_model(model, adapters)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The blocks of the decoder."""
    return next(
        m for m in model.modules() if isinstance(m, nn.ModuleList) and type(m[0]).__name__ == "LlamaDecoderLayer"
    )


@dataclass(frozen=True)
class Made:
    """A model that is ready to be trained, and what was promised for it."""

    model: nn.Module
    predicted_bytes: int = 0
    undo: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Row:
    """A contender's step.

    Attributes:
        status: measured, or what went wrong.
        setup_seconds: planning and wrapping, and a first step, which compiles, less a usual one.
        gradient_error: see the top of this file.
        reserved_bytes: by the caching allocator on a GPU.
        float32_error: as `gradient_error`, against the step in float32; 0 if that was not asked for.
    """

    contender: str
    status: str
    peak_bytes: int = 0
    predicted_bytes: int = 0
    seconds: float = 0.0
    setup_seconds: float = 0.0
    gradient_error: float = 0.0
    reserved_bytes: int = 0
    float32_error: float = 0.0

    @property
    def key(self) -> str:
        """What there is one row of."""
        return self.contender


def of_liger(model: nn.Module, *, loss_alone: bool = False) -> None:
    """Patch this model as Liger does."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    rest = not loss_alone
    apply_liger_kernel_to_llama(model=model, rope=rest, rms_norm=rest, swiglu=rest, fused_linear_cross_entropy=True)


def plain(of: Setting) -> Made:
    """As Transformers and PEFT have it."""
    return Made(of.build())


def checkpointed(of: Setting) -> Made:
    """With every layer checkpointed."""
    model: Any = of.build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Made(model)


def liger(of: Setting, *, checkpoint: bool = False) -> Made:
    """With all of Liger's kernels."""
    from transformers.models.llama import modeling_llama

    usual = dict(vars(modeling_llama))  # Liger replaces functions and classes for later models, too
    model: Any = of.build(of_liger)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Made(model, undo=lambda: vars(modeling_llama).update(usual))


def compiled(of: Setting, *, budget: float = 1.0, liger_loss: bool = True) -> Made:
    """With every layer compiled; ``budget``: ``activation_memory_budget``."""
    from torch._functorch import config

    torch._dynamo.reset()
    model = of.build(partial(of_liger, loss_alone=True) if liger_loss else lambda model: None)
    before = config.activation_memory_budget
    config.activation_memory_budget = budget
    for layer in layers_of(model):
        layer.compile(dynamic=False)
    return Made(model, undo=lambda: setattr(config, "activation_memory_budget", before))


def offloaded(of: Setting) -> Made:
    """With checkpointing and FSDP2's policy: frozen weights come from the host for each forward and backward."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    made = checkpointed(of)
    backend = "nccl" if of.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for layer in layers_of(made.model):
        trained = {p for p in layer.parameters() if p.requires_grad}
        fully_shard(layer, offload_policy=CPUOffloadPolicy(), ignored_params=trained)
    return replace(made, undo=dist.destroy_process_group)


class Swapped:
    """Frozen weights of layers on the host; those of one layer at a time are on the device.

    Args:
        layers: checkpointed ones: in the backward each runs its forward first.
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        self.here: list[tuple[nn.Parameter, Tensor]] = []
        for layer in layers:
            frozen = [(p, p.data.cpu().pin_memory()) for p in layer.parameters() if not p.requires_grad]
            for parameter, there in frozen:
                parameter.data = there
            first: Any = layer.input_layernorm  # a checkpoint runs the layer's forward again, not its hooks
            first.register_forward_pre_hook(partial(self.bring, frozen, device))

    def bring(self, frozen: list[tuple[nn.Parameter, Tensor]], device: torch.device, *_: Any) -> None:
        """Release the layer before, and copy the weights of this one."""
        if self.here is frozen:
            return
        for parameter, there in self.here:
            parameter.data = there
        for parameter, there in frozen:
            parameter.data = there.to(device, non_blocking=True)
        self.here = frozen


def swapped(of: Setting) -> Made:
    """With checkpointing, and the weights of a layer copied when it runs."""
    made = checkpointed(of)
    Swapped(layers_of(made.model), of.device)
    return made


def planned(
    of: Setting, *, budget: str, liger_loss: bool = False, backend: str = "eager", weights: str = "device"
) -> Made:
    """With a schedule for every layer, for a budget of the whole step."""
    model = of.build(partial(of_liger, loss_alone=True) if liger_loss else lambda model: None)
    tokens = of.tokens()
    model = monet_like.auto_schedule(
        model, (), {"input_ids": tokens, "labels": tokens}, memory_budget=budget, blocks=layers_of(model),
        backend=backend, weights=weights,
        keeps_result=False, effort="full", time_limit_seconds=PLAN_SECONDS, verbose=True,
    )  # fmt: skip
    plan = monet_like.block_plan(model)
    return Made(model, plan.peak_bytes)


Contenders = Iterator[tuple[str, Callable[[Setting], Made]]]


def on_the_host(budgets: tuple[str, ...], *, liger_too: bool) -> Contenders:
    """Those with frozen weights on the host, and what they are compared with."""
    yield "plain", plain
    yield "checkpoint", checkpointed
    yield "checkpoint, swapped", swapped
    yield "checkpoint, CPUOffloadPolicy", offloaded
    for budget in budgets:
        yield f"streamed for {budget}", partial(planned, budget=budget, liger_loss=liger_too, weights="auto")


def contenders(budgets: tuple[str, ...], *, liger_too: bool) -> Contenders:
    """All that can run here; *plain* first."""
    loss = "Liger's loss, " if liger_too else ""
    yield "plain", plain
    yield "checkpoint", checkpointed
    for budget in budgets:
        yield f"planned for {budget}", partial(planned, budget=budget)
    if liger_too:
        yield "Liger", liger
        yield "Liger, checkpoint", partial(liger, checkpoint=True)
        for budget in budgets:
            yield f"{loss}planned for {budget}", partial(planned, budget=budget, liger_loss=True)
    for budget in budgets:
        made = partial(planned, budget=budget, liger_loss=liger_too, backend="inductor")
        yield f"{loss}planned for {budget}, inductor", made
    for share in (1.0, 0.5, 0.2):
        words = f"{loss}compiled{'' if share == 1.0 else f', activation_memory_budget {share:g}'}"
        yield words, partial(compiled, budget=share, liger_loss=liger_too)


def step(model: nn.Module, tokens: Tensor) -> None:
    """Forward and backward, as a trainer calls them."""
    model(input_ids=tokens, labels=tokens).loss.backward()


def adapters_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Their gradients by name, on the CPU."""
    trained = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    return {name: None if grad is None else grad.cpu() for name, grad in trained}


def in_float32(of: Setting) -> dict[str, Tensor | None]:
    """Gradients of plain PyTorch's step with all weights in float32, checkpointed, which changes no bit of them."""
    model = checkpointed(of).model.float()
    step(model, of.tokens())
    return adapters_of(model)


def measured(
    name: str,
    make: Callable[[Setting], Made],
    of: Setting,
    steps: int,
    wanted: dict[str, Tensor | None],
    exact: dict[str, Tensor | None] | None = None,
) -> Row:
    """One row.

    Args:
        wanted: gets plain PyTorch's gradients if it is empty; if not, the row's are compared with it.
        exact: those of `in_float32`, or None.
    """
    started = time.perf_counter()
    made = make(of)
    try:
        model, tokens = made.model, of.tokens()

        def once() -> None:
            model.zero_grad(set_to_none=True)
            step(model, tokens)

        once()
        setup = time.perf_counter() - started
        found = adapters_of(model)
        if not wanted:
            wanted.update(found)
        model.zero_grad(set_to_none=True)
        there = resident_bytes(model, ((tokens,), {}))
        if of.device.type == "cuda":  # some weights may lie on the host
            there = torch.cuda.memory_stats(of.device)["requested_bytes.all.current"]
        peak = there + allocated_peak(partial(step, model, tokens), of.device)
        emptied(of.device)
        once()
        times = [seconds_of(once, of.device) for _ in range(steps)]
        usual, off = median(times), apart(wanted, found)
        reserved = torch.cuda.max_memory_reserved(of.device) if of.device.type == "cuda" else 0
        rounding = 0.0 if exact is None else apart(exact, found)
        return Row(name, "measured", peak, made.predicted_bytes, usual, setup - usual, off, reserved, rounding)
    finally:
        made.undo()


def markdown(of: Setting, rows: list[Row]) -> str:
    """The table."""
    words = f"{of.shape.blocks} layers of {of.shape.width}, {of.batch} x {of.length} tokens"
    title = f"# `python -m benchmarks.decoder_steps`: {device_name(of.device)}"
    columns = ["contender", "peak", "predicted", "reserved", "step", "against plain", "setup", "off"]
    exact = any(row.float32_error for row in rows)
    columns += ["off float32"] * exact
    lines = []
    base = next((row.seconds for row in rows if row.contender == "plain" and row.seconds), 0.0)
    for row in rows:
        if row.status != "measured":
            lines.append([row.contender, row.status, *[""] * (len(columns) - 2)])
            continue
        predicted = format_bytes(row.predicted_bytes) if row.predicted_bytes else ""
        reserved = format_bytes(row.reserved_bytes) if row.reserved_bytes else ""
        over = f"{100 * (row.seconds / base - 1):+.1f} %" if base else ""
        cells = [row.contender, format_bytes(row.peak_bytes), predicted, reserved, f"{1e3 * row.seconds:,.1f} ms", over]
        cells += [f"{row.setup_seconds:.0f} s", f"{row.gradient_error:.0e}"]
        lines.append(cells + [f"{row.float32_error:.0e}"] * exact)
    return f"{title}\n\n{words}; torch {torch.__version__}.\n\n{markdown_table(columns, lines)}\n"


@click.command()
@click.option("--model", "size", default="8b", type=click.Choice(["tiny", "1b", "3b", "8b"]), show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--length", default=4096, show_default=True, help="Tokens of a text.")
@click.option("--budgets", default="75%,50%,40%", show_default=True, help="Of plans, divided by commas.")
@click.option("--steps", default=5, show_default=True)
@click.option("--only", default="", help="Only contenders whose names contain one of these words, divided by commas.")
@click.option("--device", "where", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--weights", is_flag=True, help="Ways to have frozen weights on the host.")
@click.option("--exact", is_flag=True, help="Also compare gradients with those of the step in float32.")
@click.option("--seconds", default=540.0, show_default=True, help="Start nothing after so many.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the table, and of its rows as CSV.")
def main(
    size: str,
    batch: int,
    length: int,
    budgets: str,
    steps: int,
    only: str,
    where: str,
    weights: bool,
    exact: bool,
    seconds: float,
    out: Path | None,
) -> None:
    """Steps of LoRA on a Llama: peaks and times of what people use, and of plans."""
    from monet_like.ops import liger as kernels

    deadline = time.monotonic() + seconds
    of = Setting(TINY if size == "tiny" else SHAPES[f"llama_{size}"], batch, length, torch.device(where))
    rows: list[Row] = []
    wanted: dict[str, Tensor | None] = {}
    in_32_bits = in_float32(of) if exact else None
    only_these = [word for word in only.split(",") if word]
    some = on_the_host if weights else contenders
    for name, make in some(tuple(budgets.split(",")), liger_too=kernels.runs_on(of.device.type)):
        if only_these and not any(word in name for word in only_these):
            continue
        if time.monotonic() > deadline:
            rows.append(Row(name, "not run, the time was over"))
            continue
        emptied(of.device)
        try:
            rows.append(measured(name, make, of, steps, wanted, in_32_bits))
        except Exception as error:  # whatever a library says is the row
            words = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
            rows.append(Row(name, words.replace("|", "\\|")))
        print(markdown(of, rows).splitlines()[-1], file=sys.stderr, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_rows(out / "decoder_steps.csv", rows)
            write_atomically(out / "decoder_steps.md", markdown(of, rows).encode())
    print(markdown(of, rows))


if __name__ == "__main__":
    main()
