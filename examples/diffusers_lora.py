"""diffusers' training loop with LoRA on the attention of a U-Net, as its script train_text_to_image_lora.py has it; the
latents and the text embeddings, which that script makes with frozen models, are random here.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from peft import LoraConfig

import monet_like

unet = UNet2DConditionModel(
    sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
)  # fmt: skip
unet.requires_grad_(False)
unet.add_adapter(
    LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v", "to_out.0"])
)
# Each transformer of the U-Net has a schedule. Blocks that hold a skip connection would be right to rounding alone.
parts = "*.attentions.*", "*.*.attentions.*"
model = monet_like.auto_schedule(unet.train(), memory_budget="85%", blocks=parts, weights="auto", optimizer="adamw")
accelerator = Accelerator(gradient_accumulation_steps=2)
trained = [p for p in model.parameters() if p.requires_grad]
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-4))
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
for latents, text in zip(torch.randn(4, 4, 4, 16, 16), torch.randn(4, 4, 7, 32), strict=True):
    with accelerator.accumulate(model):
        noise = torch.randn_like(latents)
        steps = torch.randint(0, 1000, (4,))
        noisy = noise_scheduler.add_noise(latents, noise, steps)
        found = model(noisy, steps, text, return_dict=False)[0]
        snr = compute_snr(noise_scheduler, steps)
        weights = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).amin(dim=1) / snr
        loss = (F.mse_loss(found, noise, reduction="none").mean(dim=(1, 2, 3)) * weights).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
