"""A decoder sharded by FSDP2 whose layers have schedules under one budget: torchrun --nproc-per-node 2
examples/fsdp2.py

The loop has the shape of torchtitan's: schedules first, then `fully_shard` on each layer and on the model; the first
step plans.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


class Decoder(torch.nn.Module):
    def __init__(self, words=256, width=64, layers=3):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(words, width), torch.nn.Linear(width, words)
        made = (torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers))
        self.layers = torch.nn.ModuleList(made)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


data = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
tokens, labels = data[:, :-1], data[:, 1:].flatten()
loss_fn = lambda logits: F.cross_entropy(logits.float().flatten(0, 1), labels)  # noqa: E731

model = Decoder().to(device)
model = monet_like.auto_schedule(model, memory_budget=args.budget, blocks=model.layers, loss=loss_fn)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    optimizer.zero_grad()
    loss = loss_fn(model(tokens))
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
