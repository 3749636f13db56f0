"""The nets of `benchmarks.inductor_fronts`: with their own structure, on inputs that a small machine can run.

Inductor takes a minute or two for a hundred operators, and a net is compiled for each of its rows. So nets of many
equal blocks have fewer of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torchvision import models
from torchvision.models import convnext, resnet, vgg

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
    """VGG-16 of a quarter of the width: the weights of the full one outweigh what a small machine can have of
    activations.
    """
    model = models.vgg16(num_classes=10)
    widths = [width if width == "M" else int(width) // 4 for width in vgg.cfgs["D"]]
    model.features = vgg.make_layers(widths)
    model.classifier[0] = nn.Linear(128 * 7 * 7, 1024)
    model.classifier[3] = nn.Linear(1024, 1024)
    model.classifier[6] = nn.Linear(1024, 10)
    return model


def few_layers_of_vit() -> nn.Module:
    """Three of the twelve layers of ViT-Ti/16, with a head that is not zero at the start."""
    model = models.VisionTransformer(160, 16, 3, 3, 192, 768)
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def few_blocks_of_resnet50() -> nn.Module:
    """ResNet-50 with one block in each stage."""
    return models.ResNet(resnet.Bottleneck, [1, 1, 1, 1])


def few_blocks_of_convnext() -> nn.Module:
    """ConvNeXt-T with one block in each stage."""
    widths = (96, 192, 384, 768)
    stages = [
        convnext.CNBlockConfig(width, following, 1)
        for width, following in zip(widths, (*widths[1:], None), strict=True)
    ]
    return models.ConvNeXt(stages)


def few_layers_of_densenet() -> nn.Module:
    """DenseNet-121 with two layers in each of its blocks, instead of 6, 12, 24 and 16."""
    return models.DenseNet(32, (2, 2, 2, 2), 64)


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
    "gpt2": Measured(small_gpt2, partial(tokens(512, 128), 4), "2 layers of width 64, 4 x 128 tokens, no dropout"),
    "unet": _of_work("unet", 1, 96, "width 32, "),
    "vgg16": Measured(narrow_vgg16, partial(images, 4, 64), "a quarter of the width, batch 4, 64 pixels"),
    "vit_b_16": Measured(few_layers_of_vit, partial(images, 4, 160), "as ViT-Ti/16 with 3 layers, batch 4, 160 pixels"),
    "mobilenet_v2": _of_work("mobilenet_v2", 8, 64),
    "resnet50": Measured(few_blocks_of_resnet50, partial(images, 16, 64), "one block a stage, batch 16, 64 pixels"),
    "convnext_tiny": Measured(few_blocks_of_convnext, partial(images, 8, 64), "one block a stage, batch 8, 64 pixels"),
    "googlenet": _of_work("googlenet", 16, 64),
    "densenet121": Measured(few_layers_of_densenet, partial(images, 8, 64), "two layers a block, batch 8, 64 pixels"),
    "nnunet": Measured(
        WORK["nnunet"].cpu.make, partial(volumes(16, 16, 16), 1), "4 levels from width 16, 16 x 16 x 16 voxels"
    ),
    "llama": Measured(partial(llama, 32), partial(_sentences, 4), "32 layers of width 64, 4 x 128 tokens"),
}
#: The nine models of `benchmarks.run`, and a decoder with the structure of pytorch/pytorch#197838.
DEFAULT = tuple(name for name in NETS if name not in ("nnunet", "llama"))
