"""Hugging Face's Trainer. Instead of wrapping: Trainer(..., callbacks=[MemoryBudget("80%")])."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import monet_like

config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = monet_like.auto_schedule(LlamaForCausalLM(config), memory_budget="80%")
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (48, 64))]
arguments = TrainingArguments("trained", per_device_train_batch_size=8, num_train_epochs=1)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
trainer.train()
print(trainer.evaluate())
