"""LoRA of diffusion models, as `monet-like fits` takes it: which card trains what, and how large.

    monet-like fits examples/diffusion_steps.py:flux --cards 12GB,24GB --largest length

Needs ``diffusers`` and ``peft``. No weights are downloaded: the models have the sizes of the published ones, and no
values. ``length`` counts tokens of the transformer: an image of 1024 x 1024 pixels has 4096 in Flux.1, and 81 frames of
832 x 480 have 32,760 in Wan 2.1. Texts and latents are taken as encoded before, as LoRA scripts do.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from torch import nn

#: Attention's products, by their names in diffusers.
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
Step = tuple[nn.Module, Any, Any]


def with_adapters(model: Any, rank: int = 16) -> Any:
    """The model in bfloat16, frozen but for its adapters."""
    model.requires_grad_(False).to(torch.bfloat16)
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=ATTENTION))
    return model


def mean_square(result: Any) -> torch.Tensor:
    """To what the noise was, in float32, as the scripts of diffusers have it."""
    return result[0].float().square().mean()


def values(*shape: int) -> torch.Tensor:
    """Latents, texts or times."""
    return torch.randn(*shape, dtype=torch.bfloat16)


def flux(batch: int = 1, length: int = 4096) -> Step:
    """Flux.1-dev: a transformer of 12 billion parameters; 512 tokens of text."""
    from diffusers import FluxTransformer2DModel

    model = with_adapters(FluxTransformer2DModel(guidance_embeds=True))
    inputs = {
        "hidden_states": values(batch, length, 64), "encoder_hidden_states": values(batch, 512, 4096),
        "pooled_projections": values(batch, 768), "timestep": values(batch), "guidance": values(batch),
        "img_ids": torch.zeros(length, 3), "txt_ids": torch.zeros(512, 3), "return_dict": False,
    }  # fmt: skip
    return model, inputs, mean_square


def wan(batch: int = 1, length: int = 32760) -> Step:
    """Wan 2.1 of 14 billion parameters, from texts; latents of 60 x 104, of which four make a token."""
    from diffusers import WanTransformer3DModel

    model = with_adapters(WanTransformer3DModel())
    frames = max(1, length // (30 * 52))
    inputs = {
        "hidden_states": values(batch, 16, frames, 60, 104), "timestep": torch.zeros(batch, dtype=torch.long),
        "encoder_hidden_states": values(batch, 512, 4096), "return_dict": False,
    }  # fmt: skip
    return model, inputs, mean_square


def sdxl(batch: int = 1) -> Step:
    """Stable Diffusion XL's U-Net of 2.6 billion parameters, at 1024 x 1024 pixels."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=128, block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), cross_attention_dim=2048,
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )  # fmt: skip
    inputs = {
        "sample": values(batch, 4, 128, 128), "timestep": torch.zeros(batch, dtype=torch.long),
        "encoder_hidden_states": values(batch, 77, 2048), "return_dict": False,
        "added_cond_kwargs": {"text_embeds": values(batch, 1280), "time_ids": values(batch, 6)},
    }  # fmt: skip
    return with_adapters(model), inputs, mean_square
