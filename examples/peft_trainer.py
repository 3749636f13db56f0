"""PEFT's LoRA in Hugging Face's Trainer; frozen weights come from the host where that saves time or memory."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import monet_like

config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)
adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), adapters)
model = monet_like.auto_schedule(model, memory_budget="60%", weights="auto", keeps_result=False)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (24, 64))]
arguments = TrainingArguments("trained", per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-3)
Trainer(model, arguments, train_dataset=data).train()
model.save_pretrained("adapter")
