"""Hugging Face Accelerate: wrapped before ``prepare``; here with gradient accumulation."""

import torch
from accelerate import Accelerator
from transformers import ViTConfig, ViTForImageClassification

import monet_like

config = ViTConfig(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=64, patch_size=8
)
model = monet_like.auto_schedule(ViTForImageClassification(config).train(), memory_budget="80%")
accelerator = Accelerator(gradient_accumulation_steps=2)
data = [{"pixel_values": torch.randn(3, 64, 64), "labels": torch.tensor(i % 2)} for i in range(128)]
loader = torch.utils.data.DataLoader(data, batch_size=32)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
