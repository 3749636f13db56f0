"""The models that are measured, unmodified, and what their authors' users would checkpoint in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torchvision
from torch import nn

from monet_like.capture.example_inputs import Example
from monet_like.models import UNet
from monet_like.models.volumes import VolumeUNet, nnunet_large

Inputs = Callable[[int], Example]


def images(batch: int, height: int, width: int | None = None) -> Example:
    """Random images."""
    return (torch.randn(batch, 3, height, width or height),), {}


def sized(height: int, width: int | None = None) -> Inputs:
    """Random images of one size, by batch."""
    return lambda batch: images(batch, height, width)


def volumes(*sides: int) -> Inputs:
    """Random volumes of one channel, by batch."""
    return lambda batch: ((torch.randn(batch, 1, *sides),), {})


class LanguageModel(nn.Module):
    """Hugging Face's GPT-2, which returns its loss alone; with GPT-2's own dropout unless told otherwise."""

    def __init__(
        self, layers: int = 4, width: int = 256, heads: int = 8, words: int = 8192, length: int = 256, **config: float
    ) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.gpt2 = GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, n_positions=length, use_cache=False,
                bos_token_id=0, eos_token_id=0, **config,
            )
        )  # fmt: skip

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of tokens [batch, length]."""
        loss: torch.Tensor = self.gpt2(input_ids=tokens, labels=tokens).loss
        return loss


def tokens(words: int, length: int) -> Inputs:
    """Random tokens, by batch."""
    return lambda batch: ((torch.randint(0, words, (batch, length)),), {})


class Residual(nn.Module):
    """Two linear layers with dropout between, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, width] to the same shape."""
        y: torch.Tensor = x + self.inner(x)
        return y


def probe() -> nn.Module:
    """A small net in double precision that is nothing but dropout between layers: are gradients those of its masks?"""
    return nn.Sequential(*(Residual(32) for _ in range(6))).double()


@dataclass(frozen=True)
class Size:
    """A model and inputs on one kind of machine.

    Attributes:
        make: the model.
        inputs: random inputs for a batch.
        batches: that are measured.
        what: model and inputs in words.
    """

    make: Callable[[], nn.Module]
    inputs: Inputs
    batches: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class Work:
    """A model to measure.

    Attributes:
        cpu, gpu: on either suite.
        blocks: class names of the modules that a user would give to ``torch.utils.checkpoint``.
        sequence: the modules that run one after the other, for ``checkpoint_sequential``, and the module whose forward
            is just that; None: the model is no such sequence.
    """

    cpu: Size
    gpu: Size
    blocks: tuple[str, ...]
    sequence: Callable[[Any], tuple[nn.Module, Sequence[nn.Module]]] | None = None


def _resnet(model: Any) -> tuple[nn.Module, Sequence[nn.Module]]:
    layers = (block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer)
    stem = (model.conv1, model.bn1, model.relu, model.maxpool)
    return model, (*stem, *layers, model.avgpool, nn.Flatten(1), model.fc)


def _features(model: Any) -> tuple[nn.Module, Sequence[nn.Module]]:
    return model.features, tuple(model.features)


def _layers(model: Any) -> tuple[nn.Module, Sequence[nn.Module]]:
    return model.encoder.layers, tuple(model.encoder.layers)


def _itself(model: Any) -> tuple[nn.Module, Sequence[nn.Module]]:
    return model, tuple(model)


def _vit() -> nn.Module:
    """ViT-B/16 whose head is not zero at the start, as torchvision's is: all gradients would be zero."""
    return _alive(torchvision.models.vit_b_16())


def _vit_tiny() -> nn.Module:
    """ViT-Ti/16 (Touvron et al., DeiT, ICML 2021, table 1)."""
    return _alive(torchvision.models.VisionTransformer(160, 16, 12, 3, 192, 768))


def _alive(model: Any) -> nn.Module:
    nn.init.normal_(model.heads.head.weight, std=0.02)
    found: nn.Module = model
    return found


def _on_images(make: Callable[..., nn.Module], cpu: tuple[int, int], gpu: tuple[int, ...]) -> tuple[Size, Size]:
    """On CPU (batch, side), on GPU these batches of 224 pixels."""
    batch, side = cpu
    return Size(make, sized(side), (batch,), f"{side} pixels"), Size(make, sized(224), gpu, "224 pixels")


def _googlenet() -> nn.Module:
    return torchvision.models.googlenet(init_weights=False)  # with both auxiliary heads


_models = torchvision.models
#: By name. On the GPU first MONeT's batch, where it has the model, then one that people train with.
WORK: Mapping[str, Work] = MappingProxyType(
    {
        "resnet50": Work(*_on_images(_models.resnet50, (12, 128), (184, 64)), ("Bottleneck",), _resnet),
        "googlenet": Work(*_on_images(_googlenet, (16, 128), (320, 128)), ("Inception",)),
        "mobilenet_v2": Work(
            *_on_images(_models.mobilenet_v2, (16, 128), (272, 128)), ("InvertedResidual",), _features
        ),
        "vgg16": Work(*_on_images(_models.vgg16, (8, 128), (176, 64)), ("Sequential",), _features),
        "unet": Work(
            Size(partial(UNet, width=32), sized(192), (2,), "width 32, 192 pixels"),
            Size(UNet, sized(416, 608), (11, 4), "416 x 608 pixels"),
            ("Sequential",),
        ),
        "nnunet": Work(
            Size(
                partial(VolumeUNet, widths=(16, 32, 64, 128), blocks=(1, 2, 2, 2)),
                volumes(48, 64, 48),
                (2,),
                "4 levels from width 16, 48 x 64 x 48 voxels",
            ),
            Size(nnunet_large, volumes(160, 224, 192), (2,), "160 x 224 x 192 voxels"),
            ("ResidualBlock", "ConvBlock"),
        ),
        # Not its layers: they read a list that grows before they run again.
        "densenet121": Work(
            *_on_images(_models.densenet121, (8, 128), (128, 32)), ("_DenseBlock", "_Transition"), _features
        ),
        # B/16's weights outweigh all else at the batches that a CPU manages: there a narrower one of the same depth.
        "vit_b_16": Work(
            Size(_vit_tiny, sized(160), (16,), "as ViT-Ti/16, width 192, 160 pixels"),
            Size(_vit, sized(224), (64,), "224 pixels"),
            ("EncoderBlock",),
            _layers,
        ),
        "convnext_tiny": Work(*_on_images(_models.convnext_tiny, (8, 128), (64,)), ("CNBlock",), _features),
        "gpt2": Work(
            Size(LanguageModel, tokens(8192, 256), (4,), "4 layers of 256, 8,192 words, 256 tokens"),
            Size(
                partial(LanguageModel, 12, 768, 12, 50257, 1024),
                tokens(50257, 1024),
                (8,),
                "12 layers of 768, 1,024 tokens",
            ),
            ("GPT2Block",),
        ),
        # On a GPU bound by the host's launches.
        "gpt2_short": Work(
            Size(partial(LanguageModel, layers=2), tokens(8192, 64), (1,), "2 layers of 256, 8,192 words, 64 tokens"),
            Size(partial(LanguageModel, 12, 768, 12, 50257, 600), tokens(50257, 600), (1,), "12 x 768, 600 tokens"),
            ("GPT2Block",),
        ),
        "resnet18": Work(*_on_images(_models.resnet18, (4, 64), (8,)), ("BasicBlock",), _resnet),
    }
)

_PROBE = Size(probe, lambda batch: ((torch.randn(batch, 32, dtype=torch.float64),), {}), (512,), "double precision")
#: Not among the models that are compared: what tells whether dropout is right.
ASIDE: Mapping[str, Work] = MappingProxyType({"dropout": Work(_PROBE, _PROBE, ("Residual",), _itself)})


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        model, suite, batch: the work; ``suite`` is cpu, gpu, or gpu16: in bfloat16 autocast and channels-last.
        contender, setting: see `benchmarks.contenders`.
        budget_bytes: instead of the setting, for contenders that plan.
        profiles: folder with the costs of operators; "": to be measured on the spot.
        solver_seconds: for contenders that plan.
        rounding: how far plain PyTorch's gradients move when weights are changed in the last places, relative; 0: to be
            measured.
        judged: compare its gradients with plain PyTorch's.
    """

    model: str
    suite: str
    batch: int
    contender: str
    setting: str = ""
    budget_bytes: int = 0
    profiles: str = ""
    solver_seconds: float = 10.0
    rounding: float = 0.0
    judged: bool = True

    @property
    def work(self) -> Work:
        """The model."""
        return WORK[self.model] if self.model in WORK else ASIDE[self.model]

    @property
    def size(self) -> Size:
        """The model on this suite."""
        return self.work.cpu if self.suite == "cpu" else self.work.gpu

    @property
    def autocast(self) -> str:
        """Its dtype, or ""."""
        return "bfloat16" if self.suite == "gpu16" else ""

    @property
    def costs_file(self) -> Path:
        """The profile of this model and batch."""
        return Path(self.profiles) / f"{self.model}_{self.batch}.json"

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device("cpu" if self.suite == "cpu" else "cuda")

    def model_and_inputs(self) -> tuple[nn.Module, Example]:
        """The model in training mode and random inputs, the same in every process."""
        torch.manual_seed(0)
        model = self.size.make().train().to(self.device)
        args, kwargs = self.size.inputs(self.batch)
        example = (tuple(a.to(self.device) for a in args), {k: v.to(self.device) for k, v in kwargs.items()})
        rows = {4: torch.channels_last, 5: torch.channels_last_3d}.get(example[0][0].dim())
        if not self.autocast or rows is None:
            return model, example
        return model.to(memory_format=rows), (tuple(a.to(memory_format=rows) for a in example[0]), example[1])
