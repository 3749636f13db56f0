"""Capture: unmodified models become programs; what cannot be is refused with the reason."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import zoo
from replays import assert_exact
from torch import nn

from monet_like.capture.captured import Captured, TensorMeta, fake_mode
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError
from monet_like.ir.units import GIB, MIB
from monet_like.profile.measure import allocated_peak
from monet_like.replay.verify.steps import resident_bytes
from monet_like.variants import admitted


def image(batch: int, size: int) -> torch.Tensor:
    with fake_mode():
        return torch.empty(batch, 3, size, size)


@pytest.mark.slow
def test_resnet50_at_184_is_the_program_it_should_be() -> None:
    model, made = torchvision.models.resnet50().train(), list[Captured]()
    rise = allocated_peak(lambda: made.append(capture(model, (image(184, 224),))), torch.device("cpu"))
    assert rise < 4 * MIB  # nothing of the size of activations
    captured, program = made[0], made[0].program
    convolutions = [t for t in program.tasks if t.calls[-1].op == "aten.convolution.default"]
    assert len(convolutions) == 53
    assert len(program.gradients) == len(list(model.parameters())) == 161
    assert len(program.slots) == 176 + 52  # all convolutions but the first have two gradients, and a slot for each
    kept = {v for slot in program.slots for v in slot[0].reads if program.values[v].kind == "forward"}
    # What eager PyTorch saves for the backward: 14.6 GiB (MONeT's README measures 15.06 GB for the whole step).
    assert sum(program.values[v].bytes for v in kept) / GIB == pytest.approx(14.62, abs=0.02)
    assert program.values[captured.outputs[0].value].bytes == 184 * 1000 * 4
    assert captured.outputs[0].value in program.outputs


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, 4, 5),
        torch.zeros(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last),
        torch.zeros(4, 6, dtype=torch.int64).t(),
        torch.zeros(5, 8)[1:, ::2],
        torch.zeros(()),
    ],
)
def test_a_meta_makes_a_tensor_like_the_one_it_is_of(tensor: torch.Tensor) -> None:
    """But for the offset: it lies at the start of a storage of its own."""
    meta = TensorMeta.of(tensor)
    made = TensorMeta.of(meta.empty())
    assert replace(made, storage_bytes=meta.storage_bytes) == replace(meta, offset=0)
    with fake_mode():
        assert TensorMeta.of(meta.empty()) == made


def test_capture_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, (torch.randn(2, 3, 8, 8),))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("expression", ["y @ torch.zeros(7, 3)", "y.add_(torch.zeros(7, 3))", "y.view(3)"])
def test_an_error_of_the_forward_names_its_line(expression: str, tmp_path: Path) -> None:
    """Not a line of ours, whatever of our modes the operator ran under."""
    module = tmp_path / "mistaken.py"
    module.write_text(f"def forward(y):\n    return {expression}\n")
    space: dict[str, Any] = {"torch": torch}
    exec(compile(module.read_text(), str(module), "exec"), space)

    class Mistaken(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return space["forward"](super().forward(x))

    with pytest.raises(CaptureError, match=re.escape(f"(at {module}:2: return {expression})")):
        capture(Mistaken(4, 4), (torch.ones(2, 4),))


@pytest.mark.slow
def test_fingerprint_ignores_the_batch_and_nothing_else() -> None:
    model = zoo.shallow_resnet().train()
    one = capture(model, (image(2, 64),)).program.fingerprint
    assert capture(model, (image(8, 64),)).program.fingerprint == one
    model.layer1[0].relu = nn.SiLU()
    assert capture(model, (image(2, 64),)).program.fingerprint != one


def test_views_own_no_storage_and_gradients_have_one_each() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.view(4, 6) + self.a + self.b  # both parameters get the very same gradient
            return y.t().reshape(2, 3, 4).permute(2, 0, 1).unsqueeze(0).expand(3, -1, -1, -1)

    captured = capture(Views(), (torch.randn(24),))
    values = captured.program.values
    assert [v.bytes for v in values if v.kind == "forward"] == [96, 96]
    owners = [tensor.value for _, tensor in captured.parameter_gradients]
    assert len(set(owners)) == 2


def test_meeting_gradients_are_added_in_place() -> None:
    program = capture(zoo.shallow_resnet().train(), (image(2, 64),)).program
    adds = [way for slot in program.slots for way in slot if way.calls[-1].op.startswith("aten.add")]
    assert len(adds) == 4  # one for every residual block
    assert all(way.overwrites is not None for way in adds)


def test_what_has_several_names_is_one_value() -> None:
    model, args, kwargs = zoo.tied()
    captured = capture(model, args, kwargs)
    assert [name for name, _ in captured.parameters] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in captured.buffers] == [name for name, _ in model.named_buffers()]
    assert captured.program.resident_bytes == resident_bytes(model, (args, kwargs))
    assert {index for index, _ in captured.parameter_gradients} == set(range(len(captured.parameters)))


class _DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y[y > 0]


def test_data_dependence_is_refused_with_the_line() -> None:
    said = "_DataDependent cannot be captured.*depends on the values of a tensor.*auto_schedule.*names them as blocks="
    with pytest.raises(CaptureError, match=said) as caught:
        capture(_DataDependent(), (torch.randn(2, 4),))
    assert "return y[y > 0]" in str(caught.value)
    assert "test_capture.py" in str(caught.value)


class _Numbers(nn.Linear):
    """A number that is written into a tensor, one that was made into a tensor, and what is no number."""

    table: list[float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.new_zeros(x.shape)
        scale[:2] = 3
        y = super().forward(x) * scale * torch.tensor(0.1, dtype=torch.float64)
        return y if self.table is None else y * torch.tensor(self.table)


def test_numbers_made_into_tensors_are_literals() -> None:
    example = (_Numbers(4, 4).train(), (torch.randn(3, 4),), {})
    captured = admitted(capture(*example), "normal")
    operators = {call.op for task in captured.program.tasks for call in task.calls}
    assert {"aten.fill.Scalar", "aten.full.default"} <= operators and "aten.lift_fresh_copy.default" not in operators
    assert_exact(example, "normal")
    example[0].table = [1.0, 2.0, 3.0, 4.0]
    assert len(capture(*example).constants.tensors) == 1


class _Reshapes(nn.Linear):
    """Reshapes that PyTorch traces as views which autograd does not know of, one of them the output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).reshape(12, 4).relu().matmul(self.weight.t()).view(3, 4, 4).matmul(self.weight)


def test_reshapes_are_views() -> None:
    example = (_Reshapes(4, 4).train(), (torch.randn(4, 3, 4, requires_grad=True),), {})
    captured = admitted(capture(*example), "normal")
    operators = {call.op for task in captured.every_task() for call in task.calls}
    assert "aten.view.default" in operators and "aten._unsafe_view.default" not in operators
    assert_exact(example, "normal")


def test_no_tensor_out_and_opaque_results_are_refused() -> None:
    class Nothing(nn.Linear):
        def forward(self, x: torch.Tensor) -> int:  # type: ignore[override]
            return 3

    with pytest.raises(CaptureError, match="returned no tensor"):
        capture(Nothing(2, 2), (torch.randn(2, 2),))

    class Opaque(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, iter([y])

    with pytest.raises(CaptureError, match="returned a list_iterator, which a schedule cannot make anew"):
        capture(Opaque(2, 2), (torch.randn(2, 2),))
