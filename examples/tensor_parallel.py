"""Tensor parallelism: MLPs whose weights are split among processes, and attention with schedules: torchrun
--nproc-per-node 2 examples/tensor_parallel.py

Modules without split parameters (DTensor) have schedules under one budget, which counts all else, too: here the
attention of each layer. Without ``blocks=`` they are found. A split module as a block is refused, in words.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import monet_like

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--budget", default="85%", help="of the whole step of one process")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
if device.type == "cuda":
    torch.cuda.set_device(dist.get_rank())
torch.manual_seed(0)  # the same weights and data in all processes


class Attention(nn.Module):
    """Whole in each process."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return x + self.output((scores @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, and an MLP that is split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, 4), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(*(Layer(64) for _ in range(3)), nn.Linear(64, 8)).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model[:-1]:
    parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
model = monet_like.auto_schedule(model, memory_budget=args.budget, blocks="*.attention")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, labels = torch.randn(8, 64, 64, device=device), torch.randint(0, 8, (8, 64), device=device)
for step in range(args.steps):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
