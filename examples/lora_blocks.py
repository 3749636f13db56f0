"""LoRA on a Llama of Hugging Face, sharded by FSDP2, with a schedule for every layer: torchrun --nproc-per-node 2
examples/lora_blocks.py

Frozen weights and adapters are in one group, so they need one dtype. Only the adapters get gradients and optimizer
state.
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import monet_like

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--budget", default="75%", help="of the whole step of one process")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
if device.type == "cuda":
    torch.cuda.set_device(dist.get_rank())
torch.manual_seed(0)

config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, use_cache=False
)  # fmt: skip
adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config).train().to(device), adapters)

layers = model.base_model.model.model.layers
model = monet_like.auto_schedule(model, memory_budget=args.budget, blocks=layers, optimizer="adamw")
for layer in layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
for step in range(args.steps):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
