"""The command ``monet-like fits``: its options and help. Its code is in `monet_like.cli.fits`."""

from __future__ import annotations

from typing import Any

import click

from ..ir.defaults import MODE
from .group import main
from .options import attention_option, csv_option, with_terminal


@main.command("fits")
@click.argument("model")
@click.option("--batch", default=None, help="Samples of a step, such as 4.  [default: 1, or those of MODEL's inputs]")
@click.option("--seq", type=int, default=None, help="Tokens of a sample, such as 8192.  [default: 2048 for texts]")
@click.option(
    "--lora", type=int, default=0, help="Rank of LoRA adapters, such as 16.  [default: all parameters are trained]"
)
@click.option(
    "--quant",
    default="",
    help="Frozen weights in nf4, nf4_double or int8, as bitsandbytes has them.  [default: in --dtype]",
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    help="Whose state to count: none, sgd, momentum, adam, adamw, adamw_fused, adamw8bit, paged_adamw8bit.",
)
@click.option(
    "--optimizer-in-backward",
    is_flag=True,
    help="Each gradient is used and freed as soon as it is there.  [default: off]",
)
@click.option(
    "--dtype",
    default="",
    help="Of parameters and activations, such as float16.  [default: bfloat16, or those that MODEL's function chooses]",
)
@attention_option
@click.option("--mode", default=MODE, show_default=True, help="Variants that our plans may use; as for solve.")
@click.option(
    "--cards",
    default="rtx4080,rtx4090,a100,l40s,h100,h200",
    show_default=True,
    help="Data sheets, such as rtx3090,h100, or memories, such as 24GB.",
)
@click.option(
    "--largest",
    type=click.Choice(["batch", "length", "off"]),
    default="batch",
    show_default=True,
    help="Look for the largest batch at SEQ, or the largest length at BATCH.",
)
@click.option(
    "--reserve",
    default=None,
    show_default="5 %, at least 1 GB",
    help="Of each card's memory, for the driver and fragments; such as 0.5 or 800MB.",
)
@csv_option("a row for each card and way")
@with_terminal
def fits_command(**options: Any) -> None:
    """Say on which cards MODEL trains: plain, with a checkpoint per block, and by our plan.

    No card is needed.

    MODEL is llama_1b, llama_3b, llama_8b or llama_70b (8B and Llama-3.1-8B are the same), a config.json of
    Transformers, the name of a model on Hugging Face whose config is in the cache,
    "transformers:LlamaForCausalLM(config.json)", a MODEL of solve such as "torchvision.models.vit_b_16()", or
    path/to/file.py:make_step, a function that runs a training step, or returns a model and its inputs. Weights are not
    needed. All figures are predicted.

    \b
    Examples:
      monet-like fits 8B --lora 16 --quant nf4 --cards rtx4090,h100
      monet-like fits llama_8b --optimizer adamw8bit --optimizer-in-backward --largest length
      monet-like fits net.py:make_step --cards 24GB
    """
    from .fits import fits

    fits(**options)
