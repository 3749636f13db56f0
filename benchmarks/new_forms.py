"""What the first call of a model and the first call of another form cost: python -m benchmarks.new_forms

Each model takes a training step on one batch, and then one on longer or larger inputs. CPU seconds of both steps, side
by side: `auto_schedule`, which captures, plans and runs, and ``torch.compile(backend="aot_eager")``, which captures and
runs. Every pair is a process of its own, without kept plans or costs, that has taken both ways with another, tiny model
before. Prints Markdown.

    python -m benchmarks.new_forms --models gpt2,unet --rounds 3
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
import torchvision
from torch import nn

import monet_like
from benchmarks.work import LanguageModel, images
from monet_like.models import UNet

Call = Callable[[nn.Module], torch.Tensor]
#: A model, and its loss on the first form and on the second.
Work = tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]


def _decoder(name: str, **sizes: Any) -> nn.Module:
    """A small model of Transformers."""
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=512, hidden_size=64, intermediate_size=128, **sizes)
    head = "ForMaskedLM" if name == "Bert" else "ForCausalLM"
    model: nn.Module = getattr(transformers, f"{name}{head}")(config)
    return model


def _t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=512,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


class Blocks(nn.Module):
    """Six equal blocks in a loop, to be planned one by one."""

    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, 64, 4, 128, batch_first=True, dropout=0.0)
        self.layers = nn.ModuleList(layer() for _ in range(6))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[batch, length, 64] to the same."""
        for layer in self.layers:
            input = layer(input)
        return input


def _sentences(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 500, (2, 16 * batch))
    return {"input_ids": ids, "labels": ids}


_HEADS = {"num_hidden_layers": 4, "num_attention_heads": 4}
_LLAMA = partial(_decoder, "Llama", **_HEADS, num_key_value_heads=2, use_cache=False)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]] = {
    "resnet18": (torchvision.models.resnet18, lambda n: {"x": images(n, 64)[0][0]}),
    "googlenet": (
        partial(torchvision.models.googlenet, aux_logits=False, init_weights=False),
        lambda n: {"x": images(n, 64)[0][0]},
    ),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, lambda n: {"x": images(n, 64)[0][0]}),
    "vit": (partial(torchvision.models.VisionTransformer, 64, 16, 4, 4, 64, 128), lambda n: {"x": images(n, 64)[0][0]}),
    "unet": (UNet, lambda n: {"image": images(n, 64)[0][0]}),
    "gpt2": (partial(LanguageModel, 4, 64, 4, 512, 128), lambda n: {"tokens": _sentences(n)["input_ids"]}),
    "bert": (partial(_decoder, "Bert", **_HEADS), _sentences),
    "llama": (_LLAMA, _sentences),
    "t5": (_t5, _sentences),
    "blocks": (Blocks, lambda n: {"input": torch.randn(2, 16 * n, 64)}),
}


def _step(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> None:
    result = model(**kwargs)
    loss = getattr(result, "loss", result)
    (loss if loss.dim() == 0 else loss.square().mean()).backward()


def _ours(model: nn.Module, share: int) -> nn.Module:
    blocks = model.layers if isinstance(model, Blocks) else None
    return monet_like.auto_schedule(model, memory_budget=f"{share}%", effort="quick", blocks=blocks, verbose=False)  # type: ignore[arg-type]


def _theirs(model: nn.Module, share: int) -> nn.Module:
    return torch.compile(model, backend="aot_eager", dynamic=False)  # type: ignore[return-value]


WAYS = {"monet_like": _ours, "aot_eager": _theirs}


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def measure(name: str, way: str, share: int) -> list[float]:
    """CPU seconds of the first step, and of the first step of another form."""
    warnings.simplefilter("ignore")
    _step(WAYS[way](nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 100), {"input": torch.randn(2, 4)})
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = WAYS[way](make().train(), share)
    taken = []
    for number in (4, 5):
        given = inputs(number)
        gc.collect()
        before = cpu_seconds()
        _step(model, given)
        taken.append(cpu_seconds() - before)
    return taken


def _in_process(name: str, way: str, share: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.new_forms", "--one", f"{name}:{way}", "--share", str(share)]
        done = subprocess.run(
            command, env={**os.environ, "MONET_LIKE_CACHE": folder}, stdout=subprocess.PIPE, text=True, check=True
        )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


@click.command()
@click.option("--models", default=",".join(MODELS), help="Names, with commas between them.")
@click.option("--rounds", default=1, show_default=True, help="Processes for each pair; medians are taken.")
@click.option("--share", default=100, show_default=True, help="Budget, in percent of plain PyTorch's peak.")
@click.option("--one", hidden=True, default="")
def main(models: str, rounds: int, share: int, one: str) -> None:
    """Print a line for each model, and the medians of the ratios."""
    if one:
        print(json.dumps(measure(*one.split(":"), share)))
        return
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}; CPU seconds\n")
    print("| model | first form | aot_eager | ratio | second form | aot_eager | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    ratios: tuple[list[float], list[float]] = [], []
    for name in models.split(","):
        found = {way: [_in_process(name, way, share) for _ in range(rounds)] for way in WAYS}
        cells = []
        for form in (0, 1):
            ours, theirs = (statistics.median(each[form] for each in found[way]) for way in WAYS)
            ratios[form].append(ours / theirs)
            cells.append(f"{ours:.2f} | {theirs:.2f} | {ours / theirs:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(
        f"\nmedian ratios: first form {statistics.median(ratios[0]):.2f}, second form "
        f"{statistics.median(ratios[1]):.2f}"
    )


if __name__ == "__main__":
    main()
