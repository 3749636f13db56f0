"""Models: this package's own, and models named on the command line."""

from .loader import DEFAULT_INPUT_SHAPE, ModelSpec, build_model, is_registered, told
from .nas import amoebanet, darts, nasnet
from .unet import UNet

__all__ = [
    "DEFAULT_INPUT_SHAPE",
    "ModelSpec",
    "UNet",
    "amoebanet",
    "build_model",
    "darts",
    "is_registered",
    "nasnet",
    "told",
]
