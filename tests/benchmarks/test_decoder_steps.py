"""Steps of LoRA on a Llama beside what else is in use: the table, and that one contender leaves nothing behind for the
next.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from block_models import plan_briefly
from click.testing import CliRunner
from later import Later

from benchmarks import decoder_steps
from benchmarks.decoder_steps import TINY, Row, Setting, measured, planned
from benchmarks.rows import read_rows

modeling_llama = Later("transformers.models.llama.modeling_llama")
OF = Setting(TINY, 1, 16, torch.device("cpu"))


@pytest.mark.slow
def test_the_table(tmp_path: Path) -> None:
    words = ["--model", "tiny", "--length", "16", "--only", "plain,checkpoint", "--device", "cpu", "--steps", "1"]
    done = CliRunner().invoke(decoder_steps.main, [*words, "--exact", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    plain, checkpoint = sorted(read_rows(tmp_path / "decoder_steps.csv", Row), key=lambda row: row.contender != "plain")
    assert (plain.contender, checkpoint.contender) == ("plain", "checkpoint")
    assert checkpoint.peak_bytes < plain.peak_bytes and checkpoint.gradient_error == plain.gradient_error == 0.0
    assert 0 < plain.float32_error == checkpoint.float32_error < 0.02
    assert "| checkpoint |" in (tmp_path / "decoder_steps.md").read_text()


@pytest.mark.slow
def test_a_plan_keeps_what_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_briefly(monkeypatch.setattr)
    monkeypatch.setattr(decoder_steps, "PLAN_SECONDS", 0.5)
    wanted: dict[str, torch.Tensor | None] = {}
    plain = measured("plain", decoder_steps.plain, OF, 1, wanted)
    row = measured("planned", partial(planned, budget="95%"), OF, 1, wanted)
    assert row.status == "measured" and 0 < row.gradient_error < 0.05
    assert row.peak_bytes <= row.predicted_bytes < plain.peak_bytes


@pytest.mark.slow
def test_ligers_patches_are_undone() -> None:
    pytest.importorskip("liger_kernel.transformers")
    usual = modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP, modeling_llama.apply_rotary_pos_emb
    made = decoder_steps.liger(OF)
    assert modeling_llama.LlamaRMSNorm is not usual[0]  # Liger patches the module, too, for models that come
    made.undo()
    assert (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP, modeling_llama.apply_rotary_pos_emb) == usual
