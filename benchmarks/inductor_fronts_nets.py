"""The nets of `benchmarks.inductor_fronts`: with their own structure, on inputs that a small machine can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torchvision import models
from torchvision.models import vgg

from benchmarks.work import WORK, LanguageModel, images, tokens, volumes
from monet_like.capture.example_inputs import Example
from monet_like.models.decoders import Decoder, Shape


def llama(blocks: int) -> nn.Module:
    """A decoder with its loss, all layers alike."""
    return Decoder(Shape(width=64, blocks=blocks, heads=4, groups=4, hidden=176, vocabulary=256), length=128)


def _sentences(batch: int) -> Example:
    return tuple(torch.randint(0, 256, (batch, 128)) for _ in range(2)), {}


def small_gpt2() -> nn.Module:
    """GPT-2 in one graph: where transformers warns that no loss is named, ``torch.compile`` breaks the graph."""
    model = LanguageModel(2, 64, 4, 512, 128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model.gpt2.loss_type = "ForCausalLM"
    return model


def narrow_vgg16() -> nn.Module:
    """VGG-16 of a quarter of the width: the weights of the full one outweigh what a small machine can have of activations."""
    model = models.vgg16(num_classes=10)
    widths = [width if width == "M" else int(width) // 4 for width in vgg.cfgs["D"]]
    model.features = vgg.make_layers(widths)
    model.classifier[0] = nn.Linear(128 * 7 * 7, 1024)
    model.classifier[3] = nn.Linear(1024, 1024)
    model.classifier[6] = nn.Linear(1024, 10)
    return model


@dataclass(frozen=True)
class Measured:
    """A net that is measured.

    Attributes:
        make: the model.
        inputs: random ones.
        what: both in words.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Example]
    what: str


def _of_work(name: str, batch: int, side: int, words: str = "") -> Measured:
    size = f"{words}batch {batch}, {side} pixels"
    return Measured(WORK[name].cpu.make, partial(images, batch, side), size)


NETS: Mapping[str, Measured] = {
    "llama8": Measured(partial(llama, 8), partial(_sentences, 4), "8 layers of width 64, 4 x 128 tokens"),
    "gpt2": Measured(
        small_gpt2,
        partial(tokens(512, 128), 4),
        "2 layers of width 64, 4 x 128 tokens, no dropout",
    ),
    "unet": _of_work("unet", 1, 96, "width 32, "),
    "vgg16": Measured(narrow_vgg16, partial(images, 4, 64), "a quarter of the width, batch 4, 64 pixels"),
    "vit_b_16": _of_work("vit_b_16", 4, 160, "as ViT-Ti/16, "),
    "mobilenet_v2": _of_work("mobilenet_v2", 8, 64),
    "resnet50": _of_work("resnet50", 16, 64),
    "convnext_tiny": _of_work("convnext_tiny", 8, 64),
    "googlenet": _of_work("googlenet", 16, 64),
    "densenet121": _of_work("densenet121", 8, 64),
    "nnunet": Measured(
        WORK["nnunet"].cpu.make, partial(volumes(16, 16, 16), 1), "4 levels from width 16, 16 x 16 x 16 voxels"
    ),
    "llama": Measured(partial(llama, 32), partial(_sentences, 4), "32 layers of width 64, 4 x 128 tokens"),
}
#: The nine models of `benchmarks.run`, and a decoder with the structure of pytorch/pytorch#197838.
DEFAULT = tuple(name for name in NETS if name not in ("nnunet", "llama"))
