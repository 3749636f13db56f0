"""Models of Transformers, diffusers and timm as people train them: a schedule's steps are plain PyTorch's, bit by bit.

Each row is a small model of a config. Its batches differ in what depends on values: padding, routing to experts,
diffusion steps, masks. docs/training_scripts.md has the table of these models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from later import Later
from replays import record_for
from torch import nn
from training import tensors

from monet_like.capture.lower.step import capture
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

MODE = "inplace_multiway_newnode"
WORDS, LENGTH, BATCH = 64, 24, 2
transformers, timm = Later("transformers"), Later("timm")
DECODER: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A model and how it is called.

    Attributes:
        make: builds it.
        batch: its arguments, by the number of the step.
        library: that it needs.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    library: str = "transformers"


def _noise(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(step))


def _whole(step: int, most: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, most, (BATCH, *shape), generator=torch.Generator().manual_seed(step))


def _tokens(step: int) -> dict[str, Any]:
    tokens = _whole(step, WORDS, LENGTH)
    return {"input_ids": tokens, "labels": tokens}


def _padded(step: int) -> dict[str, Any]:
    """Another number of tokens in every step."""
    found = _tokens(step)
    mask = torch.ones_like(found["input_ids"])
    mask[0, -3 - step :] = 0
    return {**found, "attention_mask": mask, "labels": found["labels"].masked_fill(mask == 0, -100)}


def _of_transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


def _images_and_text() -> nn.Module:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(**vision, image_size=32, patch_size=8)
    text = transformers.LlamaConfig(**{**DECODER, "num_hidden_layers": 1, "use_cache": True})
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=WORDS - 1, image_seq_length=16
    )
    return transformers.LlavaForConditionalGeneration(config)


def _with_images(step: int) -> dict[str, Any]:
    tokens = _whole(step, WORDS - 1, LENGTH)
    tokens[:, 1 + step : 17 + step] = WORDS - 1
    return {"input_ids": tokens, "labels": tokens, "pixel_values": _noise(step, 3, 32, 32)}


def _of_diffusers(model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return getattr(pytest.importorskip("diffusers"), model)(**options)

    return make


UNET: dict[str, Any] = {"sample_size": 16, "block_out_channels": (16,), "layers_per_block": 1, "norm_num_groups": 8}


def _of_timm(model: str, **options: Any) -> Row:
    return Row(
        lambda: timm.create_model(model, num_classes=5, **options), lambda step: {"x": _noise(step, 3, 64, 64)}, "timm"
    )


ROWS = {
    "Mixtral": Row(_of_transformers("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4), _tokens),
    "Gemma 3": Row(
        _of_transformers(
            "Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER, head_dim=8, sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        ), _padded,
    ),
    "T5": Row(
        _of_transformers(
            "T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=1,
            num_heads=4,
            decoder_start_token_id=0,
        ), lambda step: {**_padded(step), "use_cache": False},
    ),
    "LLaVA": Row(_images_and_text, _with_images),
    "ModernBERT": Row(
        _of_transformers(
            "ModernBertForMaskedLM", "ModernBertConfig", vocab_size=WORDS, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, local_attention=16, global_attn_every_n_layers=2,
            mlp_dropout=0.1,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        ), _padded,
    ),
    "ViT-MAE": Row(
        _of_transformers(
            "ViTMAEForPreTraining", "ViTMAEConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, image_size=32, patch_size=8, decoder_hidden_size=32, decoder_num_hidden_layers=1,
            decoder_num_attention_heads=4, decoder_intermediate_size=64,
        ), lambda step: {"pixel_values": _noise(step, 3, 32, 32)},
    ),
    "Swin": Row(
        _of_transformers(
            "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[2],
            num_heads=[2],
            window_size=4, drop_path_rate=0.3,
        ), lambda step: {"pixel_values": _noise(step, 3, 32, 32), "labels": torch.tensor([0, 1])},
    ),
    "UNet with dropout": Row(
        _of_diffusers(
            "UNet2DModel", **UNET, down_block_types=("AttnDownBlock2D",), attention_head_dim=8, dropout=0.1,
            up_block_types=("AttnUpBlock2D",),
        ), lambda step: {"sample": _noise(step, 3, 16, 16), "timestep": _whole(step, 1000)}, "diffusers",
    ),
    "UNet of SDXL": Row(
        _of_diffusers(
            "UNet2DConditionModel", **UNET, down_block_types=("CrossAttnDownBlock2D",), cross_attention_dim=24,
            up_block_types=("CrossAttnUpBlock2D",), attention_head_dim=8, addition_embed_type="text_time",
            addition_time_embed_dim=8, projection_class_embeddings_input_dim=64, use_linear_projection=True,
        ), lambda step: {
            "sample": _noise(step, 4, 16, 16), "timestep": _whole(step, 1000), "encoder_hidden_states": _noise(step, 7,
            24),
            "added_cond_kwargs": {"text_embeds": _noise(step, 16), "time_ids": _whole(step, 512, 6).float()},
        }, "diffusers",
    ),
    "Flux": Row(
        _of_diffusers(
            "FluxTransformer2DModel", patch_size=1, in_channels=16, num_layers=1, num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
        ), lambda step: {
            "hidden_states": _noise(step, 16, 16), "timestep": _whole(step, 1000) / 1000,
            "encoder_hidden_states": _noise(step, 7, 24),
            "pooled_projections": _noise(step, 16), "txt_ids": torch.zeros(7, 3), "img_ids": torch.ones(16, 3),
        }, "diffusers",
    ),
    "AutoencoderKL": Row(
        _of_diffusers(
            "AutoencoderKL", **UNET, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        ), lambda step: {"sample": _noise(step, 3, 16, 16), "sample_posterior": True}, "diffusers",
    ),
    "EfficientNet": _of_timm("test_efficientnet", drop_path_rate=0.3, drop_rate=0.2),
    "MaxViT": _of_timm("maxvit_rmlp_pico_rw_256", img_size=64, drop_path_rate=0.2, depths=(1, 1), embed_dim=(32, 64)),
    "SwinV2": _of_timm(
        "swinv2_tiny_window8_256", img_size=64, window_size=4, depths=(2,), embed_dim=16, num_heads=(2,),
        drop_path_rate=0.3
    ),
}  # fmt: skip


def _trained(model: nn.Module, row: Row) -> list[torch.Tensor | None]:
    """What two steps of AdamW leave: losses, gradients, buffers, and the generator's state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[torch.Tensor | None] = []
    for step in range(2):
        torch.manual_seed(step)
        result = model(**row.batch(step))
        loss = getattr(result, "loss", None)
        if loss is None:  # as a loss of noise: the result in one scalar
            loss = tensors(result)[0].float().square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
        found.append(torch.get_rng_state())
        optimizer.step()
        optimizer.zero_grad()
    return found


#: Models whose first forward sets what they read: the kind of problem in the configuration, hooks that are installed.
SET_IN_FIRST_FORWARD = {"Swin", "LLaVA"}


@pytest.mark.slow(rare=2)
@pytest.mark.parametrize("name", ROWS)
def test_a_model_is_trained_exactly(name: str) -> None:
    row = ROWS[name]
    pytest.importorskip(row.library)
    torch.manual_seed(0)
    model = row.make().train()
    batch = row.batch(0)
    without_cache = {"use_cache": False} if name == "LLaVA" else {}  # the wrapper adds that itself
    captured = admitted(capture(model, (), {**batch, **without_cache}), MODE)
    schedule = random_schedule(captured.program, seed=1, drop=0.6)
    copied = copy.deepcopy(model)
    wrapped = ScheduleWrapper(
        copied, record_for(captured, schedule, MODE, (copied, (), batch)), example=((), batch), captured=captured
    )
    expected, found = _trained(model, row), _trained(wrapped, row)
    # What differs between batches is no reason for another capture; what the first forward sets and later ones read is.
    assert len(wrapped._kept) == 1 + (name in SET_IN_FIRST_FORWARD)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
