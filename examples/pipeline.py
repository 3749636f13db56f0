"""Pipeline stages whose layers have schedules under a budget: torchrun --nproc-per-node 2 examples/pipeline.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import monet_like

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--budget", default="80%", help="of the whole step of one process")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if device.type == "cuda":
    torch.cuda.set_device(rank)
torch.manual_seed(rank)


class Stage(nn.Module):
    def __init__(self, words=256, width=64, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(words, width) if rank == 0 else nn.Identity()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, words) if rank == world - 1 else nn.Identity()

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


data = torch.randint(0, 256, (32, 65), generator=torch.Generator().manual_seed(0)).to(device)
tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
inputs, target = (tokens,) if rank == 0 else (), {"target": labels} if rank == world - 1 else {}

model = Stage().to(device)
model = monet_like.auto_schedule(model, memory_budget=args.budget, blocks=model.layers, same_plan=False)
stage = PipelineStage(model, rank, world, device)
loss_fn = lambda x, y: nn.functional.cross_entropy(x.flatten(0, 1), y.flatten())  # noqa: E731
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
monet_like.plan_step(model, schedule.step, *inputs, **target)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    optimizer.zero_grad()
    losses = []
    schedule.step(*inputs, losses=losses, **target)
    optimizer.step()
    loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
    dist.broadcast(loss, src=world - 1)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
