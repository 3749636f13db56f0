"""TRL's trainers by their own defaults, with a memory budget: batches grow, and weights and logs are plain PyTorch's to
the bit, or to rounding where the logits are computed in parts, which takes less memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import plan_briefly

import monet_like
from monet_like.integrations.huggingface import MemoryBudget
from monet_like.profile.measure import allocated_peak

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far", "away", "from", "all",
    "of", "it",
)  # fmt: skip
SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "cache"))
    plan_briefly(monkeypatch.setattr)
    # A vocabulary of 128 in four chunks, as one of 128 thousand in chunks of 32 thousand.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 32, raising=False)
    yield tmp_path


def letters() -> Any:
    """A tokenizer of single characters."""
    import tokenizers

    known = {name: k for k, name in enumerate(("<pad>", "<s>", "</s>", "<unk>"))}
    known |= {chr(code): len(known) + k for k, code in enumerate(range(32, 127))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def text(draw: random.Random, least: int = 4, most: int = 14) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def rows(*columns: str, count: int = 12) -> Any:
    draw = random.Random(0)
    return datasets.Dataset.from_list([{column: text(draw) for column in columns} for _ in range(count)])


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    return dict(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, logging_steps=1,
        report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False, **others,
    )  # fmt: skip


def causal() -> Any:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def wide(monkeypatch: pytest.MonkeyPatch, words: int = 8192) -> None:
    """Let models have a vocabulary that outweighs them, whose logits are one tile of TRL's, as 32 thousand are."""
    monkeypatch.setitem(SIZES, "vocab_size", words)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", words)


def sft(folder: Path) -> Any:
    config = trl.SFTConfig(**settings(folder, max_length=64))
    return trl.SFTTrainer(causal(), args=config, train_dataset=rows("text"), processing_class=letters())


def dpo(folder: Path) -> Any:
    config = trl.DPOConfig(**settings(folder, max_length=96))
    data, base = rows("prompt", "chosen", "rejected"), folder / "base"
    causal().save_pretrained(base)  # the reference is loaded from there
    return trl.DPOTrainer(
        transformers.LlamaForCausalLM.from_pretrained(base), args=config, train_dataset=data, processing_class=letters()
    )


def reward(folder: Path) -> Any:
    torch.manual_seed(1)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, num_labels=1))
    config = trl.RewardConfig(**settings(folder, max_length=96))
    data = rows("prompt", "chosen", "rejected")
    return trl.RewardTrainer(model, args=config, train_dataset=data, processing_class=letters())


def grpo(folder: Path) -> Any:
    def vowels(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        spelt = [completion.count("a") + completion.count("e") + 0.01 * len(completion) for completion in completions]
        return [one + 0.1 * (sum(ids) % 13) for one, ids in zip(spelt, completion_ids, strict=True)]

    config = trl.GRPOConfig(**settings(folder, num_generations=4, max_completion_length=12, temperature=1.0))
    return trl.GRPOTrainer(
        causal(), reward_funcs=vowels, args=config, train_dataset=rows("prompt"), processing_class=letters()
    )


def trained(make: Callable[[Path], Any], folder: Path, blocks: bool | None) -> tuple[Any, Any, MemoryBudget | None]:
    """Weights and log after three steps; ``blocks``: of a budget for the blocks, or for the whole model;
    None: without.
    """
    trainer, budget = make(folder), None
    if blocks is not None:
        layers = next(part.layers for part in trainer.model.modules() if hasattr(part, "layers"))
        budget = MemoryBudget(
            "80%", mode="inplace_multiway_newnode", effort="quick", **({"blocks": layers} if blocks else {})
        )
        trainer.add_callback(budget)
    transformers.set_seed(5)
    trainer.train()
    log = [
        {name: value for name, value in entry.items() if not any(word in name for word in ("time", "second", "flos"))}
        for entry in trainer.state.log_history
    ]
    return trainer.model.state_dict(), log, budget


@pytest.mark.slow(rare=["dpo"])
@pytest.mark.parametrize("make", [sft, dpo, reward, grpo])
def test_trainers_are_plain(make: Callable[[Path], Any], tmp_path: Path) -> None:
    weights, log, _ = trained(make, tmp_path, None)
    for blocks in (False, True):
        ours, our_log, budget = trained(make, tmp_path, blocks)
        assert budget is not None
        torch.testing.assert_close(ours, weights, rtol=0, atol=0)
        assert our_log == log


def measured(trainer: Any, budget: MemoryBudget | None) -> tuple[list[int], Any, list[dict[str, Any]]]:
    """The peaks of training steps, what was allocated before not counted; weights and log at the end."""
    own, peaks = trainer.training_step, list[int]()

    def training_step(*args: Any, **kwargs: Any) -> Any:
        made = list[Any]()
        if budget is not None and not peaks:
            peaks.append(0)  # plans
            return own(*args, **kwargs)
        peaks.append(allocated_peak(lambda: made.append(own(*args, **kwargs)), torch.device("cpu")))
        return made[0]

    trainer.training_step = training_step
    if budget is not None:
        trainer.add_callback(budget)
    transformers.set_seed(5)
    trainer.train()
    return peaks[1:], trainer.model.state_dict(), trainer.state.log_history


@pytest.mark.parametrize("make", [dpo, grpo])
def test_logits_in_parts_take_less_memory(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide(monkeypatch)
    peaks, weights, log = measured(make(tmp_path), None)
    budget = MemoryBudget("50%", effort="quick")
    ours, others, our_log = measured(make(tmp_path), budget)
    assert len(ours) == len(peaks) == 2
    assert max(ours) < 0.6 * max(peaks)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=0, atol=2e-5)  # 2 % of a step of Adam
    losses, our_losses = ([entry["loss"] for entry in each if "loss" in entry] for each in (log, our_log))
    assert len(losses) == 3
    torch.testing.assert_close(our_losses, losses, rtol=0, atol=1e-4)  # as the log rounds


class Policy(torch.nn.Module):
    """The manual's module for loops of one's own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1)
        chosen = log_probs.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1)


def test_log_probabilities_in_a_loop_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO's loss with clipped ratios, a reference and an entropy bonus, outside of the model."""
    wide(monkeypatch)
    inputs = torch.randint(3, 8192, (8, 64)), torch.ones(8, 64, dtype=torch.long)
    rewards, old = torch.randn(8, 1), torch.randn(8, 63) * 0.1 - 9

    def steps(policy: torch.nn.Module) -> tuple[list[int], list[torch.Tensor]]:
        optimizer, peaks, losses = torch.optim.SGD(policy.parameters(), lr=0.1), list[int](), list[torch.Tensor]()

        def step() -> None:
            chosen, entropy = policy(*inputs)
            ratio = (chosen - old).exp()
            gain = torch.min(ratio * rewards, ratio.clamp(0.8, 1.2) * rewards)
            divergence = (old - chosen).exp() - (old - chosen) - 1
            loss = -(gain - 0.04 * divergence + 0.01 * entropy).mean()
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.detach())

        step()
        for _ in range(3):
            peaks.append(allocated_peak(step, torch.device("cpu")))
            optimizer.step()
        return peaks, [*losses, *(p.detach() for p in policy.parameters())]

    (peaks, plain), (ours, others) = (
        steps(policy)
        for policy in (
            Policy(causal()),
            monet_like.auto_schedule(Policy(causal()), memory_budget="50%", effort="quick"),
        )
    )
    assert max(ours) < 0.6 * max(peaks)
    torch.testing.assert_close(others, plain, rtol=1e-5, atol=1e-6)
