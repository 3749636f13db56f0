"""A model whose sizes depend on values: the error names its largest parts that can be captured, and these train."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import monet_like
from monet_like.auto.parts import capturable_parts
from monet_like.errors import CaptureError


def block(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())


class Selecting(nn.Module):
    """Selects rows by values, and has parts before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.after, self.tiny = block(), block(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.tiny(self.after(x[x.sum(1) > x.sum(1).median()]))


class Detector(nn.Module):
    """A backbone, and heads that select; one of them has a part that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(), nn.Dropout(0.2), block())
        self.heads = nn.ModuleDict({"selects": Selecting()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["selects"](self.backbone(x)).square().mean()


def inputs() -> torch.Tensor:
    return torch.randn(16, 8) * torch.linspace(0.1, 2, 8)


def test_the_error_names_the_largest_parts() -> None:
    torch.manual_seed(0)
    model, x = Detector(), inputs()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    call = nn.Module.__call__
    with pytest.raises(CaptureError, match="depends on the values of a tensor") as caught:
        monet_like.auto_schedule(model, x, memory_budget="100%", effort="quick", verbose=False)
    assert str(caught.value).endswith(
        "; these parts can be captured: auto_schedule(model, blocks=['backbone', 'heads.selects.first', "
        "'heads.selects.after'])"
    )
    assert nn.Module.__call__ is call and torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_parts_whose_sizes_depend_on_values_are_left_out() -> None:
    class Sliced(Detector):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.backbone(x)
            return self.heads["selects"].after(x[x[:, 0] > x.mean()]).sum()

    torch.manual_seed(0)
    x = torch.randn(16, 3, 8)

    class Pooled(Sliced):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, 0])

    assert capturable_parts(Pooled(), (x,), {}) == ["backbone"]


def test_parts_whose_sizes_depend_on_numbers_of_other_parts_are_left_out() -> None:
    """Experts get the numbers that a router has computed from its parameters."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = block(), block()

        def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            own, other = torch.where(numbers == 0)[0], torch.where(numbers == 1)[0]
            return torch.cat([self.own(x[own]), self.other(x[other])])

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), Experts()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts(x, self.router(x).argmax(1)).sum()

    torch.manual_seed(0)
    assert capturable_parts(Routed(), (inputs(),), {}) == ["router", "experts.own", "experts.other"]


def test_a_model_that_can_be_captured_nowhere() -> None:
    class Everywhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            return x[x > 0].sum()

    with pytest.raises(CaptureError) as caught:
        monet_like.auto_schedule(Everywhere(), inputs(), memory_budget="100%", effort="quick", verbose=False)
    assert "these parts can be captured" not in str(caught.value)


@pytest.mark.slow
def test_the_named_parts_train() -> None:
    torch.manual_seed(0)
    model, given = Detector(), [inputs() for _ in range(3)]
    plain = copy.deepcopy(model)
    with pytest.raises(CaptureError) as caught:
        monet_like.auto_schedule(model, given[0], memory_budget="100%", effort="quick", verbose=False)
    found = re.search(r"blocks=\[(.*)\]\)$", str(caught.value))
    assert found is not None
    names = [name.strip("'") for name in found[1].split(", ")]

    def train(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        losses = []
        for x in given:
            losses.append(model(x))
            losses[-1].backward()
        return [*losses, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    expected = train(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        monet_like.auto_schedule(
            model,
            given[0],
            memory_budget="300%",
            mode="inplace_multiway_newnode",
            effort="quick",
            verbose=False,
            blocks=names,
        )
    torch.testing.assert_close(train(model), expected, rtol=0, atol=0)
