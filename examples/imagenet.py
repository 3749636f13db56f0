"""ImageNet classification with the flags of PyTorch's own recipe, and --solution_file or --budget for a schedule.

    python solve.py "torchvision.models.resnet50()" 256 12 inplace_conv_multiway_newnode CBC --out resnet50.json
    python examples/imagenet.py -a resnet50 -b 256 --gpu 0 --solution_file resnet50.json DATA
    torchrun --nproc-per-node 8 examples/imagenet.py -a resnet50 -b 2048 --solution_file resnet50.json DATA

DATA holds the folders ``train`` and ``val`` with one folder for each class. Under torchrun the batch is that of all
processes together, and the schedule that of one; with --sync-bn it must be of a model with SyncBatchNorm, solved with
--processes. Without --solution_file and --budget it is plain training.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

import monet_like


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-a", "--arch", default="resnet18", show_default=True, help="A model of torchvision.")
@click.option("-j", "--workers", default=4, show_default=True, help="Processes that load data.")
@click.option("--epochs", default=90, show_default=True)
@click.option("--start-epoch", default=0, show_default=True)
@click.option("-b", "--batch-size", default=256, show_default=True, help="Of all processes together.")
@click.option("--lr", "--learning-rate", default=0.1, show_default=True)
@click.option("--momentum", default=0.9, show_default=True)
@click.option("--wd", "--weight-decay", default=1e-4, show_default=True)
@click.option("-p", "--print-freq", default=10, show_default=True, help="Steps between two lines.")
@click.option(
    "--resume", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A checkpoint to go on from."
)
@click.option("-e", "--evaluate", is_flag=True, help="Evaluate on the validation set, train nothing.")
@click.option("--seed", type=int)
@click.option("--gpu", type=int, help="The only GPU to use.")
@click.option("--image-size", default=224, show_default=True, help="Of the square images, in pixels.")
@click.option("--sync-bn", is_flag=True, help="Batch norm by the statistics of all processes' images.")
@click.option("--solution-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A schedule.")
@click.option("--budget", help="Plan at the first step for this memory, such as 8 GB or 60%.")
def main(data: Path, resume: Path | None, evaluate: bool, start_epoch: int, epochs: int, **options: Any) -> None:
    """Train a model of torchvision on DATA."""
    device, processes = set_up(options["gpu"])
    if options["seed"] is not None:
        torch.manual_seed(options["seed"])
    train_set, val_set = (
        image_folder(data / part, options["image_size"], part == "train") for part in ("train", "val")
    )
    model = torchvision.models.get_model(options["arch"], num_classes=len(train_set.classes)).to(device)
    if options["sync_bn"]:
        model = monet_like.convert_sync_batchnorm(model)
    trained = scheduled(model, options)
    if processes > 1:
        trained = DistributedDataParallel(trained)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options["lr"], momentum=options["momentum"], weight_decay=options["wd"]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if resume:
        checkpoint = torch.load(resume, map_location=device)
        start_epoch = checkpoint.pop("epoch")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    sampler = DistributedSampler(train_set) if processes > 1 else None
    own = {"batch_size": options["batch_size"] // processes, "num_workers": options["workers"]}
    loader = DataLoader(train_set, shuffle=sampler is None, sampler=sampler, **own)
    val_loader = DataLoader(val_set, **own)
    if evaluate:
        validate(val_loader, model, device)
        return
    for epoch in range(start_epoch, epochs):
        if sampler:
            sampler.set_epoch(epoch)
        train(loader, trained, optimizer, epoch, device, options["print_freq"])
        scheduler.step()
        if is_first():
            validate(val_loader, model, device)
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"epoch": epoch + 1, **state}, "checkpoint.new")
            Path("checkpoint.new").replace("checkpoint.pth.tar")
        if processes > 1:
            dist.barrier()
    if processes > 1:
        dist.destroy_process_group()


def set_up(gpu: int | None) -> tuple[torch.device, int]:
    """This process's device, and how many processes there are."""
    cuda = torch.cuda.is_available()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
        gpu = int(os.environ["LOCAL_RANK"])
    if not cuda:
        return torch.device("cpu"), dist.get_world_size() if dist.is_initialized() else 1
    device = torch.device("cuda", gpu or 0)
    torch.cuda.set_device(device)
    return device, dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def image_folder(folder: Path, size: int, augmented: bool) -> datasets.ImageFolder:
    """Images of one folder for each class: random crops and flips to train, the centre to validate."""
    shape = (
        [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
        if augmented
        else [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    )
    normal = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    return datasets.ImageFolder(str(folder), transforms.Compose([*shape, transforms.ToTensor(), normal]))


def scheduled(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """The model with the schedule that was asked for; all else is as without monet_like."""
    if options["solution_file"]:
        size = options["image_size"]
        monet_like.reserve(options["solution_file"])
        return monet_like.ScheduleWrapper(model, options["solution_file"], (3, size, size))
    return monet_like.auto_schedule(model, memory_budget=options["budget"]) if options["budget"] else model


def train(
    loader: DataLoader[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    device: torch.device,
    every: int,
) -> None:
    """One pass over the training set."""
    model.train()
    begin = time.perf_counter()
    for number, (images, labels) in enumerate(loader):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        output = model(images)
        loss = nn.functional.cross_entropy(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % every == 0 and is_first():
            seconds = (time.perf_counter() - begin) / (number + 1)
            print(
                f"epoch {epoch} step {number}/{len(loader)}: loss {loss.item():.6f}, {seconds:.3f} s a step", flush=True
            )


@torch.no_grad()
def validate(loader: DataLoader[Any], model: nn.Module, device: torch.device) -> None:
    """Print the share of images whose class, or whose class among the first five, is right."""
    model.eval()
    first = five = count = 0
    for images, labels in loader:
        output = model(images.to(device))
        guesses = output.topk(min(5, output.shape[1])).indices.cpu()
        right = guesses == labels[:, None]
        first, five, count = first + int(right[:, 0].sum()), five + int(right.any(1).sum()), count + len(labels)
    print(f"accuracy: first {100 * first / count:.2f} %, first five {100 * five / count:.2f} %", flush=True)


if __name__ == "__main__":
    main()
