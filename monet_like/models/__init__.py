"""Models: this package's own, and models named on the command line."""

from .adapters import QUANTISATIONS, add_adapters, check_quantisation
from .decoders import SHAPES, Decoder, Shape, decoder
from .loader import DEFAULT_INPUT_SHAPE, ModelSpec, build_model, is_registered, told
from .nas import amoebanet, darts, nasnet
from .parts import Parts, attention_window, parts_of
from .unet import UNet

__all__ = [
    "DEFAULT_INPUT_SHAPE",
    "QUANTISATIONS",
    "SHAPES",
    "Decoder",
    "ModelSpec",
    "Parts",
    "Shape",
    "UNet",
    "add_adapters",
    "amoebanet",
    "attention_window",
    "build_model",
    "check_quantisation",
    "darts",
    "decoder",
    "is_registered",
    "nasnet",
    "parts_of",
    "told",
]
