"""The large nnU-Net preset on a card with 24 GB, at a patch that plain PyTorch needs 30 GB for.

python examples/volumes.py                                       on a GPU: 192 x 256 x 224 voxels, float16
python examples/volumes.py --device cpu --side 32 --budget 60%   to try it
"""

from __future__ import annotations

import click
import torch
from torch import nn

import monet_like
from monet_like.models.volumes import VolumeUNet, nnunet_large


def segmentation_loss(results: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy at every resolution, each with half the weight of the one above (deep supervision)."""
    loss = torch.zeros((), device=labels.device)
    for level, result in enumerate(results):
        smaller = labels[:, :: 2**level, :: 2**level, :: 2**level]
        loss = loss + nn.functional.cross_entropy(result.float(), smaller) / 2**level
    return loss


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--side", default=0, help="Of a small cubic patch for a small net; 0: the large preset.")
@click.option("--budget", default="23 GB", show_default=True)
@click.option("--steps", default=10, show_default=True)
def main(device: str, side: int, budget: str, steps: int) -> None:
    """Train on random volumes."""
    torch.manual_seed(0)
    model: nn.Module = (
        VolumeUNet(widths=(8, 16, 32), blocks=(1, 1, 1), patch=(side,) * 3) if side else nnunet_large(192, 256, 224)
    )
    model = monet_like.auto_schedule(model.to(device), memory_budget=budget, optimizer="momentum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    volume = model.make_inputs(2).to(device)
    labels = (volume[:, 0] > 0.5).long()
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            results = model(volume)
        loss = segmentation_loss(results, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
