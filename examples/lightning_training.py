"""Lightning: a callback wraps the part of the LightningModule that holds the layers."""

import lightning
import torch
import torchvision

import monet_like


class Schedule(lightning.Callback):
    """Train ``module.model`` within a memory budget."""

    def __init__(self, memory_budget: str) -> None:
        self.memory_budget = memory_budget

    def on_fit_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        module.model = monet_like.auto_schedule(module.model, memory_budget=self.memory_budget)


class Classifier(lightning.LightningModule):
    """As without monet_like."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torchvision.models.squeezenet1_1(num_classes=10)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


model = Classifier()
data = torch.utils.data.TensorDataset(torch.randn(80, 3, 64, 64), torch.randint(0, 10, (80,)))
trainer = lightning.Trainer(max_epochs=1, callbacks=[Schedule("90%")], accelerator="cpu", devices=1)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=32))
