"""What the replay itself costs: python -m benchmarks.overhead

Schedules that keep everything and run PyTorch's own operators, beside plain PyTorch: the same operators in the same
order, so that the ratio of their times is that of the wrapper. Alternating steps in one process, medians. The last
model is so small that its operators are no longer than the Python between them. Prints Markdown.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import click
import torch
import torchvision
from torch import nn

from benchmarks.work import images
from monet_like.capture.example_inputs import Example
from monet_like.compiler.pipeline import compile_schedule
from monet_like.compiler.request import Request
from monet_like.profile.devices import DEVICES
from monet_like.replay.verify.steps import step_seconds
from monet_like.replay.wrapper import ScheduleWrapper

CPU = torch.device("cpu")


def gpt2() -> nn.Module:
    """A GPT-2 of 4 layers, which returns its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=256, vocab_size=4096, use_cache=False))


def words(batch: int, tokens: int) -> Example:
    """Random tokens, which are the labels too."""
    found = torch.randint(0, 4096, (batch, tokens))
    return (), {"input_ids": found, "labels": found}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Example]]] = {
    "ResNet-18, batch 8, 112 pixels": (torchvision.models.resnet18, partial(images, 8, 112)),
    "ViT, 4 layers of 256, batch 8, 112 pixels": (
        partial(torchvision.models.VisionTransformer, 112, 16, 4, 4, 256, 1024),
        partial(images, 8, 112),
    ),
    "GPT-2, 4 layers of 256, batch 4, 256 tokens": (gpt2, partial(words, 4, 256)),
    "ResNet-50, batch 2, 32 pixels": (torchvision.models.resnet50, partial(images, 2, 32)),
}


@click.command()
@click.option("--steps", default=25, show_default=True, help="Timed steps of each.")
@click.option("--rounds", default=3, show_default=True, help="Medians are taken so often.")
def main(steps: int, rounds: int) -> None:
    """Print every round's medians and their ratio."""
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}\n")
    print("| model | plain PyTorch | replay | ratio |\n|---|---|---|---|")
    for name, (make, inputs) in MODELS.items():
        torch.manual_seed(0)
        plain, example = make().train(), inputs()
        request = Request(plain, example, "normal", strategy="store_all")
        record = compile_schedule(request, 2**50, CPU, profile=DEVICES["cpu"]).record
        wrapped = ScheduleWrapper(copy.deepcopy(plain), record, example=example)
        for _ in range(rounds):
            eager, replay = step_seconds([(plain, example), (wrapped, example)], CPU, steps)
            print(f"| {name} | {1e3 * eager:.1f} ms | {1e3 * replay:.1f} ms | {replay / eager:.3f} |", flush=True)


if __name__ == "__main__":
    main()
