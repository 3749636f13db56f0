"""What a task of several operators makes and releases on its way: counted as it is measured."""

from __future__ import annotations

import functools

import pytest
import zoo
from replays import FULL, costs_of

from monet_like.compiler.request import Request, captured_for
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline


@functools.cache
def bytes_of_tasks(name: str) -> dict[str, tuple[str, int, int]]:
    """By name, the variant of a task, and its workspace by datasheet rates and measured."""
    model, args, kwargs = getattr(zoo, name)()
    captured = captured_for(Request(model, (args, kwargs), FULL), (args, kwargs))
    measured = costs_of(captured, (model, args, kwargs), FULL, timed=False)
    estimated = roofline(captured, DEVICES["cpu"])
    return {
        task.name: (task.variant, estimated[task.cost].workspace_bytes, measured[task.cost].workspace_bytes)
        for task in captured.every_task()
        if not task.copies
    }


@pytest.mark.parametrize("name", ["decoder", "bert", "mobilenet"])
def test_what_tasks_make_on_their_way_is_counted(name: str) -> None:
    """Kernels of ATen and oneDNN may need more than their results, which only measuring tells."""
    tasks = bytes_of_tasks(name)
    assert all(estimated <= measured for _, estimated, measured in tasks.values())
    assert any(estimated for _, estimated, _ in tasks.values())


def test_what_tiles_make_is_counted_to_the_byte() -> None:
    """An MLP at once, which PyTorch's own gradients in one slot are, and in tiles; a loss from parts of the logits."""
    tasks = {name: found for name, found in bytes_of_tasks("decoder").items() if "onednn" not in name}
    tiled = {name: found for name, found in tasks.items() if found[0].startswith(("tiled_mlp", "swiglu.backward"))}
    assert {variant.rpartition(".")[2] for variant, _, _ in tiled.values()} == {"1", "4", "16", "backward"}
    assert all(estimated == measured > 0 for _, estimated, measured in tiled.values())
