"""Models: this package's own, and models named on the command line."""

from .adapters import QUANTISATIONS, add_adapters, check_quantisation
from .decoders import SHAPES, Decoder, Shape, decoder
from .loader import DEFAULT_INPUT_SHAPE, ModelSpec, build_model, function_of, is_registered, told
from .nas import amoebanet, darts, nasnet
from .unet import UNet

__all__ = [
    "DEFAULT_INPUT_SHAPE",
    "QUANTISATIONS",
    "SHAPES",
    "Decoder",
    "ModelSpec",
    "Shape",
    "UNet",
    "add_adapters",
    "amoebanet",
    "build_model",
    "check_quantisation",
    "darts",
    "decoder",
    "function_of",
    "is_registered",
    "nasnet",
    "told",
]
