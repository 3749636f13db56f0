"""Small versions of real models, with inputs: what every stage must be able to handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.googlenet import Inception
from torchvision.models.inception import InceptionA
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
from torchvision.models.segmentation.fcn import FCNHead

from monet_like.models.volumes import VolumeUNet

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def image(batch: int, size: int, *, requires_grad: bool = False) -> torch.Tensor:
    made = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(3))
    return made.to(torch.get_default_dtype()).requires_grad_(requires_grad)


def _vision(name: str, batch: int, size: int, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        return getattr(torchvision.models, name)(**options).train(), (image(batch, size),), {}

    return build


def shallow_resnet(num_classes: int = 1000) -> nn.Module:
    """ResNet-18 with one block at each width instead of two."""
    return torchvision.models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=num_classes)


def mobilenet(batch: int = 4, size: int = 112, *, requires_grad: bool = False) -> Built:
    """The first three blocks of MobileNetV2's seventeen: each kind, with and without a residual."""
    blocks = [[1, 16, 1, 2], [6, 24, 2, 2]]
    model = torchvision.models.MobileNetV2(inverted_residual_setting=blocks)
    return model.train(), (image(batch, size, requires_grad=requires_grad),), {}


def densenet(batch: int = 4, size: int = 64) -> Built:
    """DenseNet-121 with an eighth of its layers: three dense blocks and the transitions between them."""
    return torchvision.models.DenseNet(32, (2, 3, 2)).train(), (image(batch, size),), {}


def googlenet(batch: int = 4, size: int = 64) -> Built:
    """With three of its nine modules, which are all of one kind, and both auxiliary outputs."""
    model = torchvision.models.googlenet(num_classes=10, init_weights=False)
    for name in ("3a", "3b", "4b", "4c", "4e", "5a"):
        setattr(model, f"inception{name}", nn.Identity())
    model.inception4a = Inception(192, 192, 96, 208, 16, 48, 64)
    model.inception5b = Inception(528, 384, 192, 384, 48, 128, 128)
    return model.train(), (image(batch, size),), {}


def inception(batch: int = 4, size: int = 96) -> Built:
    """One module of each kind of Inception v3."""
    model = torchvision.models.inception_v3(init_weights=False, aux_logits=False)
    for name in ("5b", "5d", "6c", "6d", "6e", "7c"):
        setattr(model, f"Mixed_{name}", nn.Identity())
    model.Mixed_5c = InceptionA(192, pool_features=64)
    return model.train(), (image(batch, size),), {}


def efficientnet(batch: int = 4, size: int = 96) -> Built:
    """Four of EfficientNet's sixteen blocks: with and without expansion, strides and residuals."""
    settings = [(1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 1)]
    blocks = [MBConvConfig(*setting) for setting in settings]
    return torchvision.models.EfficientNet(blocks, 0.2, last_channel=320).train(), (image(batch, size),), {}


def convnext(batch: int = 4, size: int = 160) -> Built:
    """Three stages of ConvNeXt, of half the width, with four of its eighteen blocks."""
    blocks = [CNBlockConfig(48, 96, 1), CNBlockConfig(96, 192, 2), CNBlockConfig(192, None, 1)]
    return torchvision.models.ConvNeXt(blocks, stochastic_depth_prob=0.1).train(), (image(batch, size),), {}


def swin(batch: int = 4, size: int = 64) -> Built:
    """Two stages of Swin Transformer, of half the width; of the first's two blocks one has shifted windows."""
    model = torchvision.models.SwinTransformer([4, 4], 48, [2, 1], [3, 6], [7, 7], stochastic_depth_prob=0.2)
    return model.train(), (image(batch, size),), {}


def unet(batch: int = 2, size: int = 64) -> Built:
    from monet_like.models import UNet

    return UNet(width=8, depth=2).train(), (image(batch, size),), {}


def narrow_vgg(batch: int = 6, size: int = 128) -> Built:
    """VGG-11 of a quarter of the width, with few weights in the classifier, which else outweighs activations."""
    layers = (16, "M", 32, "M", 64, 64, "M", 128, 128, "M", 128, 128, "M")
    model = torchvision.models.VGG(torchvision.models.vgg.make_layers(layers))
    for place, (wide, narrow) in {0: (128 * 49, 32), 3: (32, 32), 6: (32, 10)}.items():
        model.classifier[place] = nn.Linear(wide, narrow)
    return model.train(), (image(batch, size),), {}


def vit(batch: int = 4) -> Built:
    model = torchvision.models.VisionTransformer(
        image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=96, mlp_dim=192, dropout=0.1
    )
    nn.init.normal_(model.heads.head.weight)  # torchvision's zeros would make all other gradients zero
    return model.train(), (image(batch, 64),), {}


def deeplab(batch: int = 2, size: int = 48) -> Built:
    """With the first two bottlenecks of a ResNet, one at each width and none with a stride."""
    resnet = torchvision.models.ResNet(Bottleneck, [1, 1, 1, 1], replace_stride_with_dilation=[True, True, True])
    backbone = IntermediateLayerGetter(resnet, {"layer2": "out", "layer1": "aux"})
    model = DeepLabV3(backbone, DeepLabHead(512, 5), FCNHead(256, 5))
    return model.train(), (image(batch, size),), {}


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=257, n_positions=64, use_cache=False)
    tokens = torch.randint(0, 257, (4, 48), generator=torch.Generator().manual_seed(5))
    return GPT2LMHeadModel(config).train(), (), {"input_ids": tokens, "labels": tokens}


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=199,
        use_cache=False,
    )
    tokens = torch.randint(0, 199, (3, 40), generator=torch.Generator().manual_seed(6))
    mask = torch.ones_like(tokens)
    mask[1, 30:] = 0
    return BertForMaskedLM(config).train(), (), {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


class TwoInTwoOut(nn.Module):
    """Two inputs, two outputs, a tied weight, a skip, and a parameter used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(24, 32)
        self.right = nn.Linear(16, 32)
        self.shared = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32))
        self.drop = nn.Dropout(0.1)

    def forward(self, a: torch.Tensor, *, b: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.tanh(self.left(a))
        y = torch.relu(self.right(b))
        both = self.drop(self.shared(x) * self.scale + self.shared(y))
        return {"sum": both + x, "norm": (both * y).softmax(-1)}


class Tied(nn.Module):
    """One weight as embedding and as two heads, one batch norm under two names, and one with its running mean."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(words, width), nn.Linear(width, width)
        self.head, self.second_head = nn.Linear(width, words, bias=False), nn.Linear(width, words, bias=False)
        self.head.weight = self.second_head.weight = self.embedding.weight
        self.norm = self.same_norm = nn.BatchNorm1d(width)
        self.other_norm = nn.BatchNorm1d(width)
        self.other_norm.running_mean = self.norm.running_mean

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        y = self.same_norm(torch.tanh(torch.tanh(self.inner(x)) * x) + x)
        return self.head(torch.tanh(y) * y).tanh() + self.second_head(self.other_norm(x))


class _DecoderBlock(nn.Module):
    """Gated feed-forward behind a norm, added to its input, as in Llama; ``spelled`` out as Hugging Face does."""

    def __init__(self, width: int, *, spelled: bool) -> None:
        super().__init__()
        self.norm: nn.Module = SpelledRMSNorm(width) if spelled else nn.RMSNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class SpelledRMSNorm(nn.Module):
    """RMS norm in operators: at least float32 for the statistics, the result rounded before it meets the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def decoder(rows: int = 12, width: int = 24) -> Built:
    """What Llama is made of, but for attention: both kinds of RMS norm, on a residual stream."""
    blocks = (_DecoderBlock(width, spelled=spelled) for spelled in (False, True, False))
    x = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(8), dtype=torch.get_default_dtype())
    return nn.Sequential(nn.Linear(width, width), *blocks, nn.RMSNorm(width)).train(), (x,), {}


def two_in_two_out(rows: int = 64) -> Built:
    generator = torch.Generator().manual_seed(7)
    dtype = torch.get_default_dtype()
    a = torch.randn(rows, 24, generator=generator).to(dtype)
    b = torch.randn(rows, 16, generator=generator).to(dtype)
    return TwoInTwoOut().train(), (a,), {"b": b}


def tied(rows: int = 48, words: int = 400) -> Built:
    tokens = torch.randint(0, words, (rows,), generator=torch.Generator().manual_seed(9))
    return Tied(words, 32).train(), (tokens,), {}


def activations() -> Built:
    """Every activation behind a batch norm, max pooling, a residual, a gate: a small detector's backbone."""

    def block(inputs: int, outputs: int, activation: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), activation)

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.two = block(width, width, nn.Hardswish()), nn.Conv2d(width, width, 1, bias=False)
            self.norm, self.gate = nn.BatchNorm2d(width), nn.Conv2d(width, width, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.leaky_relu(self.norm(self.two(self.one(x))) + x, 0.2)
            return x * nn.functional.hardsigmoid(self.gate(x.mean((2, 3), keepdim=True)))

    layers = [block(3, 16, nn.LeakyReLU(0.1)), nn.MaxPool2d(2), block(16, 24, nn.SiLU()), Residual(24), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(24 * 12 * 12, 10)).train(), (image(4, 24),), {}


def volumes(side: int = 16) -> Built:
    """nnU-Net's shape in small: 3-D convolutions, instance norm, leaky ReLU in place, residual blocks, two results."""
    volume = torch.randn(2, 1, side, side, side, generator=torch.Generator().manual_seed(8))
    model = VolumeUNet(1, 2, (8, 12, 16), (1, 2, 1)).train()
    for convolution in model.modules():
        if isinstance(convolution, nn.Conv3d) and convolution.kernel_size == (3, 3, 3):
            convolution.bias = None  # before a norm: its true gradient is 0, and would be nothing but rounding
    return model, (volume.to(torch.get_default_dtype()),), {}


def frozen_parameters() -> Built:
    model, inputs, _ = mobilenet()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("features.0", "features.1.", "features.2.")))
    return model, inputs, {}


def frozen_batch_norm() -> Built:
    model, inputs, _ = mobilenet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model, inputs, {}


def input_gradient() -> Built:
    return mobilenet(requires_grad=True)


MODELS: dict[str, Callable[[], Built]] = {
    "resnet18": _vision("resnet18", 4, 64),
    "shallow_resnet": lambda: (shallow_resnet().train(), (image(4, 64),), {}),
    "resnet50": _vision("resnet50", 4, 64),
    "googlenet": googlenet,
    "inception_v3": inception,
    "mobilenet_v2": lambda: mobilenet(4, 64),
    "vgg": lambda: narrow_vgg(4, 64),
    "densenet": densenet,
    "efficientnet_b0": lambda: efficientnet(4, 64),
    "activations": activations,
    "convnext": convnext,
    "vit_b_16": vit,
    "swin": swin,
    "unet": unet,
    "volumes": volumes,
    "deeplab": deeplab,
    "gpt2": gpt2,
    "bert": bert,
    "decoder": decoder,
    "two_in_two_out": two_in_two_out,
    "tied": tied,
    "frozen_parameters": frozen_parameters,
    "frozen_batch_norm": frozen_batch_norm,
    "input_gradient": input_gradient,
}

#: The same models with inputs so large that activations outweigh weights: 60 % of the plain peak can be reached by
#: most; in the ResNet, vgg, googlenet, deeplab and two_in_two_out single layers take more.
ROOMY: dict[str, Callable[[], Built]] = MODELS | {
    "shallow_resnet": lambda: (shallow_resnet(10).train(), (image(10, 128),), {}),
    "googlenet": lambda: googlenet(8, 96),
    "mobilenet_v2": mobilenet,
    "vgg": narrow_vgg,
    "densenet": lambda: densenet(4, 80),
    "efficientnet_b0": efficientnet,
    "vit_b_16": lambda: vit(24),
    "swin": lambda: swin(3, 160),
    "unet": lambda: unet(4, 128),
    "volumes": lambda: volumes(32),
    "deeplab": lambda: deeplab(2, 64),
    "two_in_two_out": lambda: two_in_two_out(2000),
    "tied": lambda: tied(2000),
}
