"""A model, loss, optimizer and averaged weights of timm."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler

import monet_like

model = monet_like.auto_schedule(timm.create_model("test_efficientnet", num_classes=10), memory_budget="80%")
ema = ModelEmaV3(model, decay=0.9)
optimizer, scaler, loss_fn = (
    create_optimizer_v2(model, "adamw", lr=1e-3),
    NativeScaler("cpu"),
    LabelSmoothingCrossEntropy(),
)
images, labels = torch.randn(4, 8, 3, 96, 96), torch.randint(0, 10, (4, 8))
for x, y in zip(images, labels, strict=True):
    optimizer.zero_grad()
    scaler(loss_fn(model(x), y), optimizer, clip_grad=1.0, parameters=model.parameters())
    ema.update(model)
