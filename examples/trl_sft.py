"""TRL's SFTTrainer with LoRA; frozen weights come from the host where that saves time or memory."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import monet_like

# One token for each letter, so that nothing is downloaded.
known = {name: number for number, name in enumerate(("<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ."))}
letters = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)  # fmt: skip

config = LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, use_cache=False,
    pad_token_id=0, eos_token_id=1,
)  # fmt: skip
adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), adapters)
model = monet_like.auto_schedule(model, memory_budget="60%", weights="auto", keeps_result=False)
# The lengths of batches differ: the longest comes first, and later ones are planned within its bytes.
data = Dataset.from_list([{"text": "the quick brown fox jumps over the lazy dog. " * (1 + k % 2)} for k in range(12)])
arguments = SFTConfig(
    "trained", per_device_train_batch_size=4, max_steps=3, max_length=64, bf16=torch.cuda.is_available()
)  # fmt: skip
SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer).train()
