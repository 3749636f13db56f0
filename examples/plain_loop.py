"""A plain loop over a decoder with LoRA: gradient accumulation, clipping, a learning rate that falls. Frozen weights
come from the host where that saves time or memory.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import monet_like

config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)
adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), adapters).train()
model = monet_like.auto_schedule(model, memory_budget="60%", weights="auto", optimizer="adamw")
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
for step, tokens in enumerate(torch.randint(0, 256, (8, 4, 64))):
    (model(input_ids=tokens, labels=tokens).loss / 2).backward()
    if step % 2:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
