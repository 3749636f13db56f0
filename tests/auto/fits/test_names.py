"""What people call cards and models."""

from __future__ import annotations

from pathlib import Path

import pytest

from monet_like.auto.fits.fits import _card
from monet_like.auto.fits.question import read_question
from monet_like.errors import UsageError
from monet_like.ir.units import format_bytes


@pytest.mark.parametrize(
    ("card", "name", "gigabytes"),
    [
        ("rtx3090", "rtx3090", 24),
        ("NVIDIA GeForce RTX 3090", "rtx3090", 24),
        ("RTX-5090", "rtx5090", 32),
        ("H100 PCIe", "h100-pcie", 80),
        ("24GB", "24GB as rtx4090", 24),
        ("12 gb", "12GB as rtx4080", 12),
        ("200GB", "200GB as h200", 200),
    ],
)
def test_cards_have_several_names(card: str, name: str, gigabytes: int) -> None:
    limits = _card(card)
    assert (limits.name, limits.memory_bytes) == (name, gigabytes * 2**30)


@pytest.mark.parametrize(
    "name", ["Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3-8B", "8B"]
)
def test_common_names_of_shapes(name: str) -> None:
    model = read_question(name).model
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248


def test_a_config_names_its_class_and_what_is_not_quantised_is_told(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(num_hidden_layers=2, vocab_size=512, **sizes)
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"config\.json does not say of which class the model is \(architectures\)"):
        read_question(str(tmp_path))
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "config.json"), f"transformers:{tmp_path / 'config.json'}"):
        asked = read_question(name, lora=4, quant="nf4")
        assert type(asked.model).__name__ == "MixtralForCausalLM"
    experts = 2 * 8 * 2048 * 64 * 2
    assert f"mlp.experts.gate_up_proj of {format_bytes(2 * experts)}, mlp.experts.down_proj of" in str(asked)
    assert "not quantised" not in str(read_question("8B", lora=4, quant="nf4"))


def test_a_name_on_hugging_face_needs_its_config_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    hub = pytest.importorskip("huggingface_hub")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=512, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    there = {"nobody/nothing": str(tmp_path / "config.json")}
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: there.get(name))
    assert type(read_question("nobody/nothing").model).__name__ == "LlamaForCausalLM"
    with pytest.raises(UsageError, match=r"^the config of nobody/else is not in Hugging Face's cache; load it once"):
        read_question("nobody/else")
