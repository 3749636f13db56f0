"""The package's own operator variants, in the order in which they are offered."""

from __future__ import annotations

from collections.abc import Mapping

from . import (
    attention,
    batch_norm,
    concatenation,
    convolution,
    convolution_parts,
    copy_slices,
    dense_block,
    dropit,
    dropout,
    group_norm,
    in_place,
    instance_norm,
    liger,
    linear,
    linear_cross_entropy,
    low_precision,
    offload,
    padded,
    pooling,
    relu,
    rms_norm,
    swiglu,
    tiled_logits,
    tiled_mlp,
)
from .editor import Offer

#: The package's own variants by name. The functions are called in this order: gradients are split before other ways
#: read them, in-place ways are made from the other ways, and slots are merged with all their ways. Liger's kernels
#: stand beside ours that are there already.
BUILT_IN: Mapping[str, Offer] = {
    "copy_slices": copy_slices.offer,
    "concatenation": concatenation.offer,
    "dense_block": dense_block.offer,
    "relu": relu.offer,
    "pooling": pooling.offer,
    "dropout": dropout.offer,
    "batch_norm": batch_norm.offer,
    "group_norm": group_norm.offer,
    "instance_norm": instance_norm.offer,
    "rms_norm": rms_norm.offer,
    "convolution": convolution.offer,
    "convolution.algorithms": convolution.offer_algorithms,
    "convolution_parts": convolution_parts.offer,
    "attention": attention.offer,
    "linear": linear.offer,
    "dropit": dropit.offer,
    "in_place": in_place.offer,
    "batch_norm.backward": batch_norm.offer_backward,
    "batch_norm.without_reserve": batch_norm.offer_without_reserve,
    "instance_norm.backward": instance_norm.offer_backward,
    "tiled_mlp": tiled_mlp.offer,
    "swiglu": swiglu.offer,
    "liger": liger.offer,
    "linear_cross_entropy": linear_cross_entropy.offer,
    "tiled_logits": tiled_logits.offer,
    "padded": padded.offer,
    "low_precision": low_precision.offer,
    "offload": offload.offer,
}
