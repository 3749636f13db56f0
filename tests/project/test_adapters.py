"""PEFT's adapters, on plain and on 4-bit weights, through Hugging Face's Trainer: as without a budget, to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from later import Later
from quantised_nets import adapted_llama, peft, transformers
from torch import nn

from monet_like.errors import UsageError

state, huggingface = Later("accelerate.state"), Later("monet_like.integrations.huggingface")
QUICK: dict[str, Any] = {"mode": "inplace_multiway_newnode", "effort": "quick"}


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    state.AcceleratorState._reset_state(reset_partial_state=True)


def llama() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, use_cache=False, **sizes))
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    ), tokens()


def tokens() -> list[dict[str, torch.Tensor]]:
    rows = (torch.arange(64).view(4, 16) * 7 % 61).repeat(4, 1)
    return [{"input_ids": row, "labels": row} for row in rows]


def four_bit() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    return adapted_llama("4bit"), tokens()


def eight_bit() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    return adapted_llama("8bit"), tokens()


def vit() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(num_hidden_layers=2, num_attention_heads=4, num_labels=5, **sizes)
    )
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=r".*\.(q_proj|query|fc1)", modules_to_save=["classifier"])
    )
    images = torch.randn(16, 3, 32, 32)
    return model, [{"pixel_values": image, "labels": torch.tensor(k % 5)} for k, image in enumerate(images)]


def trained(made: tuple[nn.Module, Any], folder: Path, *callbacks: Any, evaluated: bool = False) -> nn.Module:
    model, data = made
    options = {"eval_strategy": "steps", "eval_steps": 2} if evaluated else {}
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        save_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks)).train()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, four_bit, eight_bit, vit])
def test_adapters_train_and_save_as_without(make: Callable[[], Any], tmp_path: Path) -> None:
    plain = trained(make(), tmp_path / "plain")
    budget = huggingface.MemoryBudget("80%", **QUICK)
    ours = trained(make(), tmp_path / "ours", budget)
    assert budget.wrapper is not None and budget.wrapper.record is not None
    assert budget.wrapper.record.peak_bytes <= 0.8 * budget.wrapper.record.plain_peak_bytes
    mine, theirs = ours.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert any((mine[key] != value).any() for key, value in make()[0].state_dict().items())
    files = [sorted(p.name for p in (tmp_path / way / "checkpoint-3").iterdir()) for way in ("ours", "plain")]
    assert files[0] == files[1] and "adapter_model.safetensors" in files[0]
    ours.save_pretrained(str(tmp_path / "saved"))
    loaded = peft.PeftModel.from_pretrained(make()[0].get_base_model(), str(tmp_path / "saved"))
    trainable = {key: value for key, value in ours.state_dict().items() if "lora" in key or "modules_to_save" in key}
    assert trainable and all(torch.equal(loaded.state_dict()[key], value) for key, value in trainable.items())


@pytest.mark.slow
def test_blocks_of_adapters_train_and_save_as_without(tmp_path: Path) -> None:
    """With dropout and an evaluation; the model's own layers are back at the end."""
    plain = trained(llama(), tmp_path / "plain", evaluated=True)
    model, data = llama()
    layers = list(model.base_model.model.model.layers)
    budget = huggingface.MemoryBudget("80%", blocks=layers, **QUICK)
    ours = trained((model, data), tmp_path / "ours", budget, evaluated=True)
    assert budget.plan is not None and budget.plan.peak_bytes <= budget.plan.budget_bytes < budget.plan.plain_peak_bytes
    assert all(one is other for one, other in zip(ours.base_model.model.model.layers, layers, strict=True))
    mine, theirs = ours.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert any((mine[key] != value).any() for key, value in llama()[0].state_dict().items())
    files = [sorted(p.name for p in (tmp_path / way / "checkpoint-3").iterdir()) for way in ("ours", "plain")]
    assert files[0] == files[1] and "adapter_model.safetensors" in files[0]


def test_blocks_are_trained_without_a_cache() -> None:
    """Of keys and values, which is another object in every step; afterwards, also after a training that failed, it is
    on again.
    """
    model, _ = llama()
    layers = model.base_model.model.model.layers
    before, model.config.use_cache = list(layers), True
    budget = huggingface.MemoryBudget("80%", blocks=layers, **QUICK)
    for _ in range(2):
        budget.on_train_begin(None, None, None, model=model)
        assert model.config.use_cache is False and list(layers) != before
    budget.on_train_end(None, None, None, model=model)
    assert model.config.use_cache is True and list(layers) == before and budget.plan is None
    with pytest.raises(UsageError, match="has a name like 'blocks"):
        huggingface.MemoryBudget("80%", blocks="blocks.*").on_train_begin(None, None, None, model=model)
    assert model.config.use_cache is True
