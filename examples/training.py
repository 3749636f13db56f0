"""A training loop on a scheduled model. The two lines that matter are marked; all else is as without monet_like.

python examples/training.py [--steps 20] [--budget 70%]
"""

from __future__ import annotations

import click
import torch
import torchvision
from torch import nn

import monet_like  # 1


@click.command()
@click.option("--steps", default=20, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--size", default=96, show_default=True, help="Of the square images, in pixels.")
@click.option("--budget", default="70%", show_default=True, help="Of plain PyTorch's peak, or such as 1.5 GB.")
@click.option("--planning", default=60.0, show_default=True, help="Seconds to plan in, at most.")
def main(steps: int, batch: int, size: int, budget: str, planning: float) -> None:
    """Train a MobileNetV2 on random images."""
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.mobilenet_v2(num_classes=10)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    model = monet_like.auto_schedule(model, memory_budget=budget, time_limit_seconds=planning)  # 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
