"""Models on the meta device are captured for a GPU that is not here, as the same program as with weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from monet_like import problem
from monet_like.capture.lower.step import capture
from monet_like.cli import main
from monet_like.errors import UsageError

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def net() -> nn.Module:
    """With a tied weight and a buffer."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.GELU())
    model[2].weight = model[0].weight
    return model


def test_the_program_is_that_of_the_model_with_weights() -> None:
    with torch.device("meta"):
        model, x = net(), torch.empty(4, 8)
    before = dict(model.named_parameters())
    there, here = capture(model, (x,), target=CUDA), capture(net(), (torch.randn(4, 8),), target=CUDA)
    assert there.program.fingerprint == here.program.fingerprint
    assert [v.spec for v in there.program.values] == [v.spec for v in here.program.values]
    assert [name for name, _ in there.parameters] == [name for name, _ in here.parameters]
    assert all(p is before[name] and p.is_meta for name, p in model.named_parameters())
    assert model[2].weight is model[0].weight


def test_a_model_comes_back_where_its_capture_fails() -> None:
    with torch.device("meta"):
        model = nn.LSTM(8, 8)
    with pytest.raises(Exception, match="lstm"):
        capture(model, (torch.empty(3, 2, 8, device="meta"),), target=CUDA)
    assert all(p.is_meta for p in model.parameters())


def test_it_is_planned_for_a_card_that_is_named() -> None:
    with torch.device("meta"):
        model = net().to(torch.bfloat16)
    job = problem(model, torch.empty(4, 8, dtype=torch.bfloat16), device="roofline:h100", mode="normal", verbose=False)
    assert job.captured.device == CUDA and job.request.capability == (9, 0)
    assert job.plan("100%", strategy="store_all").record.device == "roofline:h100"
    assert all(p.is_meta for p in model.parameters())


def test_without_a_card_it_is_refused() -> None:
    with torch.device("meta"):
        model = net()
    with pytest.raises(UsageError, match=r'on the meta device, .*; plan it for a GPU .* device="roofline:h100"'):
        problem(model, torch.empty(4, 8))


def test_commands_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n    with torch.device('meta'):\n"
        "        return nn.Sequential(nn.Linear(8, 8), nn.GELU())\n\n\ndef make_inputs(batch):\n    return "
        "torch.zeros(batch, 8)\n"
    )
    words = ["solve", "net.py:make", "4", "100%", "normal", "--profile", "roofline:a100", "--strategy", "store_all"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0 and "roofline:a100" in done.output, done.output
    refused = CliRunner().invoke(main, words[:5])
    assert refused.exit_code == 2 and "is on the meta device, where tensors have no values" in refused.stderr
