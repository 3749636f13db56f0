"""Opacus: per-sample gradients for differential privacy, with a schedule for the layers that are not trained.

Opacus keeps the activations of each trained layer and sets gradients of samples in the backward; that cannot be in a
schedule. So the trained layers run as they are, and the frozen ones, here a backbone, have the schedules.
"""

import warnings

import torch
import torchvision
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator

import monet_like

warnings.filterwarnings("ignore", module="opacus")


class Adapted(torch.nn.Module):
    """A frozen backbone between a trained adapter of the images and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        backbone = ModuleValidator.fix(torchvision.models.squeezenet1_1())  # no batch norm
        self.colours = torch.nn.Conv2d(3, 3, 1)
        self.backbone = torch.nn.Sequential(backbone.features, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        self.backbone.requires_grad_(False)
        self.head = torch.nn.Linear(512, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(self.colours(images)))


model = Adapted()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
    poisson_sampling=False,
)  # fmt: skip
model = monet_like.auto_schedule(model, memory_budget="80%", blocks=["_module.backbone"])
for images, labels in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
