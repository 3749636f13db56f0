"""TRL's trainers by their own defaults, with a memory budget: batches grow, and weights and logs are plain PyTorch's to
the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monet_like.integrations.huggingface import MemoryBudget

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "runs",
    "far",
    "away",
    "from",
    "all",
    "of",
    "it",
]
SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "cache"))
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
    def vowels(completions: list[str], **_: Any) -> list[float]:
        return [completion.count("a") + completion.count("e") + 0.01 * len(completion) for completion in completions]

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


@pytest.mark.parametrize("make", [sft, dpo, reward, grpo])
def test_trainers_are_plain(make: Callable[[Path], Any], tmp_path: Path) -> None:
    weights, log, _ = trained(make, tmp_path, None)
    for blocks in (False, True):
        ours, our_log, budget = trained(make, tmp_path, blocks)
        assert budget is not None
        torch.testing.assert_close(ours, weights, rtol=0, atol=0)
        assert our_log == log
