"""The U-Net of Stable Diffusion XL, with adapters of rank 16 on its attentions (LoRA)."""

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from torch import nn


class Adapted(nn.Module):
    """``(latents, timesteps, text, pooled text, sizes)`` to the noise that is found."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(
            sample_size=128, in_channels=4, out_channels=4, block_out_channels=(320, 640, 1280), layers_per_block=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=2048,
            transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        )  # fmt: skip
        self.unet.requires_grad_(False)
        self.unet.add_adapter(LoraConfig(r=16, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))

    def forward(
        self, latents: torch.Tensor, steps: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, sizes: torch.Tensor
    ) -> torch.Tensor:
        """Of the latents' shape."""
        known = {"text_embeds": pooled, "time_ids": sizes}
        return self.unet(latents, steps, text, added_cond_kwargs=known, return_dict=False)[0]


def make_model() -> nn.Module:
    """On the meta device: no memory is allocated."""
    with torch.device("meta"):
        return Adapted()


def make_inputs(batch: int) -> tuple[torch.Tensor, ...]:
    """Of images of 1,024 x 1,024 pixels."""
    latents, text, pooled = (
        torch.empty(batch, *shape, dtype=torch.bfloat16) for shape in ((4, 128, 128), (77, 2048), (1280,))
    )
    return latents, torch.zeros(batch, dtype=torch.long), text, pooled, torch.empty(batch, 6, dtype=torch.bfloat16)
