"""`checkpoint_policy` within Hugging Face's Trainer: weights after two steps equal those without to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from later import Later
from torch import nn

import monet_like
from monet_like.export.selective import SelectivePolicy

transformers = Later("transformers")

DATA_SEED, BATCH = 1, 8


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes))


def sentences() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 64, (4 * BATCH, 64), generator=torch.Generator().manual_seed(DATA_SEED))
    return [{"input_ids": row, "labels": row} for row in rows]


def policy_of(model: nn.Module) -> SelectivePolicy:
    ids = torch.stack([sample["input_ids"] for sample in sentences()[:BATCH]])
    plan = monet_like.problem(model, kwargs={"input_ids": ids, "labels": ids}, mode="normal").plan("80%", quick=True)
    return monet_like.checkpoint_policy(plan, regions="model.layers.*")


def keeping_gradients(steps: list[list[torch.Tensor]]) -> Any:
    """A callback that appends the gradients of every step."""

    class Gradients(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            steps.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

    return Gradients()


def trained(model: nn.Module, folder: Path, **more: Any) -> list[list[torch.Tensor]]:
    """Train two optimizer steps and save each; returns the gradients of every step."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=BATCH, report_to="none", use_cpu=True, save_steps=1,
        disable_tqdm=True, **more,
    )  # fmt: skip
    steps: list[list[torch.Tensor]] = []
    callbacks = [keeping_gradients(steps)]
    transformers.Trainer(model, arguments, train_dataset=sentences(), callbacks=callbacks).train()
    return steps


@pytest.mark.slow
def test_the_trainer_makes_the_same_gradients_and_weights_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of optimizer steps of two micro-batches."""
    model = llama()
    plain, start = copy.deepcopy(model), copy.deepcopy(model)
    policy = policy_of(model)
    served: list[int] = []
    call = SelectivePolicy.__call__

    def counted(self: SelectivePolicy) -> Any:
        served.append(self._next % len(self.plan.regions))
        return call(self)

    monkeypatch.setattr(SelectivePolicy, "__call__", counted)
    wanted = trained(plain, tmp_path / "plain", gradient_accumulation_steps=2)
    found = trained(
        model, tmp_path / "policy", gradient_accumulation_steps=2, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": policy},
    )  # fmt: skip
    assert served == [0, 1, 2, 3] * (2 * 2)
    assert len(found) == len(wanted) == 2 and len(found[0]) == len(list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not any(
        torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True) if a.dim() > 1
    )
    # Arguments are written with the policy.
    assert (tmp_path / "policy" / "checkpoint-2" / "training_args.bin").exists()
