"""Streamed weights in the loops that people have: PEFT's LoRA in Hugging Face's Trainer, and a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import plan_briefly
from later import Later
from quantised_nets import adapted_llama
from streamed_models import stream
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of

transformers, peft, state, huggingface = map(
    Later, ("transformers", "peft", "accelerate.state", "monet_like.integrations.huggingface")
)
TOKENS = torch.arange(64).view(4, 16) * 7 % 61
QUICK: dict[str, Any] = {"exact": True, "effort": "quick"}


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plan_briefly(monkeypatch.setattr)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


def llama() -> Any:
    """Two layers with LoRA on two projections of each, with dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, pad_token_id=0, **sizes))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).train()


def layers(model: Any) -> nn.ModuleList:
    found: nn.ModuleList = model.base_model.model.model.layers
    return found


def trained(model: nn.Module, folder: Path, callbacks: Any) -> list[float]:
    data = [{"input_ids": row[:8], "labels": row[:8]} for row in TOKENS.repeat(4, 1)]
    words = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_steps": 3}
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=5, per_device_train_batch_size=2, learning_rate=1e-2, **words
    )
    loop = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=callbacks)
    loop.train()
    return [entry["loss"] for entry in loop.state.log_history if "loss" in entry]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.slow
def test_the_trainer_with_an_adapter(tmp_path: Path) -> None:
    """Losses, adapters and checkpoints are those without; afterwards the model merges as ever."""
    plain: Any = llama()
    mine: Any = llama()
    callback = huggingface.MemoryBudget("75%", weights="auto", **QUICK)
    expected = trained(plain, tmp_path / "plain", None)
    assert trained(mine, tmp_path / "mine", [callback]) == expected
    assert callback.plan is not None and any(point.ahead for point in callback.plan.points)
    assert not blocks_of(mine)
    assert_same(mine, plain)
    saved = [tmp_path / name / "checkpoint-3" / "adapter_model.safetensors" for name in ("plain", "mine")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    assert_same(mine.merge_and_unload(), plain.merge_and_unload())


@pytest.mark.slow
def test_a_plain_loop_saves_generates_and_changes_adapters(tmp_path: Path) -> None:
    plain = llama()
    plain.config.use_cache = False
    mine = copy.deepcopy(plain)
    mine = monet_like.auto_schedule(mine, memory_budget="75%", weights="auto", **QUICK)
    models: tuple[Any, Any] = plain, mine

    def steps(count: int) -> list[list[float]]:
        found: list[list[float]] = []
        for model in models:
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            torch.manual_seed(3)
            found.append([])
            for _ in range(count):
                loss = model(input_ids=TOKENS[:, :8], labels=TOKENS[:, :8]).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found[-1].append(loss.item())
        return found

    losses = steps(4)
    assert losses[0] == losses[1]
    plan = monet_like.block_plan(mine)
    assert plan is not None and any(point.ahead for point in plan.points)
    for model, name in zip(models, ("plain", "mine"), strict=True):
        model.eval()
        model.save_pretrained(tmp_path / name)
        model.train()
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("plain", "mine")]
    assert files[0].read_bytes() == files[1].read_bytes()
    words = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    texts = [model.eval().generate(input_ids=TOKENS[:2, :4], **words) for model in models]
    assert torch.equal(*texts)
    for model in models:
        torch.manual_seed(5)
        model.train()
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.set_adapter("second")
    losses = steps(2)
    assert losses[0] == losses[1]
    for model in models:
        model.set_adapter("default")
    losses = steps(2)
    assert losses[0] == losses[1]
    again: Any = monet_like.unwrap(mine)
    merged = again.merge_and_unload()
    assert_same(merged, plain.merge_and_unload())


@pytest.mark.slow
def test_adapters_are_merged_while_weights_are_streamed(tmp_path: Path) -> None:
    """Merged, taken out again and switched off between steps; then for good, and saved as a whole."""
    plain = llama()
    plain.config.use_cache = False
    mine: Any = monet_like.auto_schedule(
        copy.deepcopy(plain), TOKENS[:, :8], memory_budget="100%", blocks="base_model.model.model.layers.*", **QUICK
    )
    made = stream(mine)
    models: tuple[Any, Any] = plain, mine

    def logits() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model.eval()(input_ids=TOKENS[:, :8]).logits for model in models]

    def trains() -> None:
        gradients = []
        for model in models:
            torch.manual_seed(4)
            model.train().zero_grad()
            model(input_ids=TOKENS[:, :8]).logits.square().mean().backward()
            gradients.append([p.grad for p in model.parameters() if p.requires_grad])
            with torch.no_grad():
                for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                    parameter.add_(0.01)
        assert all(map(torch.equal, *gradients)) and gradients[0]

    trains()
    before = logits()
    assert torch.equal(*before)
    with plain.disable_adapter(), mine.disable_adapter():
        without = logits()
    assert torch.equal(*without) and not torch.equal(without[0], before[0])
    for model in models:
        model.merge_adapter()
    assert torch.equal(*logits())
    for model in models:
        model.unmerge_adapter()
    assert torch.equal(*logits())
    trains()
    assert len(made.weights) == 3
    folders = [tmp_path / name for name in ("plain", "mine")]
    models = plain.merge_and_unload(), mine.merge_and_unload()
    assert torch.equal(*logits())
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    assert_same(models[1], models[0])
    assert (folders[0] / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["4bit", "8bit", "torchao"])
@pytest.mark.filterwarnings("ignore")
def test_quantised_llamas(kind: str) -> None:
    plain: Any = adapted_llama(kind)
    mine: Any = copy.deepcopy(plain)
    mine = monet_like.auto_schedule(mine, memory_budget="100%", blocks=layers(mine), **QUICK)
    losses: list[list[float]] = []
    for model in (plain, mine):
        torch.manual_seed(2)
        losses.append([])
        for step in range(4):
            if step == 1 and model is mine:
                assert stream(mine, slots=1).weights
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
            model.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
