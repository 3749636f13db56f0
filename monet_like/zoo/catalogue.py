"""The zoo's catalogue: models, batches and budgets, and the devices that they are planned for."""

from __future__ import annotations

from dataclasses import dataclass

#: The profiles, in the order in which they are built; the first is taken where none is asked for or at hand.
PROFILES = ("a100", "h100", "h200", "rtx4090")
#: All exact variants.
MODE = "inplace_conv_multiway_newnode"


@dataclass(frozen=True)
class Entry:
    """A model at a batch, and its budgets.

    Attributes:
        name: short, as in file names.
        model: as the command line takes it.
        batch: how many samples.
        budgets: of the whole step: GB (2**30 bytes) as ``"10"``, or shares of plain PyTorch's peak as ``"70%"``.
    """

    name: str
    model: str
    batch: int
    budgets: tuple[str, ...]


_GIGABYTES = ("10", "9", "8", "7", "6", "5")
_SHARES = ("70%", "50%", "35%")
#: MONeT's five nets at its batches and budgets (README of MONeT; 5.5 GB for VGG-16, and 5 GB to say whether it can
#: be), then others.
CATALOGUE = (
    Entry("resnet50", "torchvision.models.resnet50()", 184, _GIGABYTES),
    Entry("googlenet", "torchvision.models.googlenet(init_weights=False)", 320, _GIGABYTES),
    Entry("mobilenet_v2", "torchvision.models.mobilenet_v2()", 272, _GIGABYTES),
    Entry("vgg16", "torchvision.models.vgg16()", 176, ("10", "9", "8", "7", "6", "5.5", "5")),
    Entry("unet", "unet", 11, _GIGABYTES),
    Entry("nnunet_large", "monet_like.models.volumes.nnunet_large()", 2, _SHARES),
    Entry("vit_b_16", "torchvision.models.vit_b_16()", 64, _SHARES),
    Entry("convnext_tiny", "torchvision.models.convnext_tiny()", 64, _SHARES),
    Entry("swin_t", "torchvision.models.swin_t()", 64, _SHARES),
    Entry("gpt2", "monet_like.zoo.models.gpt2()", 8, _SHARES),
    Entry("llama_1b", "monet_like.zoo.models.llama_1b()", 4, _SHARES),
)
