"""Models of Hugging Face's libraries, wrapped: saved, loaded, resized and generated from as the model itself is."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from later import Later
from torch import nn

import monet_like
from monet_like.auto.auto_schedule import AutoSchedule

#: No word that changes an order of sums, and no long search.
QUICK: dict[str, Any] = {"mode": "inplace_multiway_newnode", "effort": "quick"}
TOKENS = torch.arange(64).view(4, 16) * 7 % 61
transformers, state, huggingface = map(
    Later, ("transformers", "accelerate.state", "monet_like.integrations.huggingface")
)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """`TrainingArguments(torch_compile=True)` tells Accelerate of it, by the environment and by the state of the
    process.
    """
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    state.AcceleratorState._reset_state(reset_partial_state=True)


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    options = {"num_hidden_layers": 2, "tie_word_embeddings": True, "pad_token_id": 0, **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options)).train()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).train()


def wrapped(model: nn.Module, memory_budget: str | int = "90%", **options: Any) -> AutoSchedule:
    return monet_like.auto_schedule(model, memory_budget=memory_budget, **QUICK, **options)


def trainer(model: nn.Module, folder: Path, steps: int = 4, callbacks: Any = None, **options: Any) -> Any:
    data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    words = {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_steps": 2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
    }
    arguments = transformers.TrainingArguments(str(folder), max_steps=steps, **words, **options)
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)


def of_many_lengths(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 5 to 16 tokens."""
    rows = (TOKENS.repeat(8, 1)[number, : 5 + 7 * number % 12] for number in range(count))
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch that is as long as its longest row."""
    pad = nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in rows], batch_first=True, padding_value=0)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).long()}


@pytest.mark.slow(rare=2)
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (13, {}),  # a last batch of one
        (16, {"train_sampling_strategy": "group_by_length", "label_smoothing_factor": 0.1}),
        (16, {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 3}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*runs as plain PyTorch")
def test_whole_epochs_of_batches_of_many_lengths(rows: int, options: dict[str, Any], tmp_path: Path) -> None:
    """No batch ends the run, and the weights are the plain model's."""
    results = []
    for callbacks in (None, [huggingface.MemoryBudget("70%", **QUICK)]):
        given = {"max_steps": -1, "num_train_epochs": 1, "logging_steps": 1, "seed": 3, **options}
        model, folder = llama(), str(tmp_path / str(callbacks is None))
        words = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=4, **words, **given)
        loop = transformers.Trainer(
            model, arguments, train_dataset=of_many_lengths(rows), data_collator=padded, callbacks=callbacks
        )
        loop.train()
        results.append((model, [entry.get("loss") for entry in loop.state.log_history]))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    wrapper = callbacks[0].wrapper if callbacks else None
    assert wrapper is not None and any(wrapper._kept)  # not all of it was plain PyTorch


@pytest.mark.slow
@pytest.mark.parametrize(("make", "how"), [(llama, "wrapper"), (gpt2, "callback")])
def test_trainer_saves_resumes_and_loads_as_without(make: Any, how: str, tmp_path: Path) -> None:
    """With tied embeddings: checkpoints, resumed training and the saved folder are the plain model's."""
    plain = make()
    trainer(plain, tmp_path / "plain").train()

    def scheduled(folder: str, steps: int) -> Any:
        callback = huggingface.MemoryBudget("90%", **QUICK)
        model = wrapped(make()) if how == "wrapper" else make()
        return trainer(model, tmp_path / folder, steps, [callback] if how == "callback" else None)

    scheduled("first", 2).train()
    resumed = scheduled("first", 4)
    resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model, plain)
    wrapper = resumed.model
    if how == "callback":
        (callback,) = (one for one in resumed.callback_handler.callbacks if isinstance(one, huggingface.MemoryBudget))
        wrapper = callback.wrapper
        assert "forward" not in vars(resumed.model)  # given back
    assert wrapper.record is not None and wrapper.record.peak_bytes < wrapper.record.plain_peak_bytes
    resumed.save_model(str(tmp_path / "saved"))
    assert sorted(p.name for p in (tmp_path / "first" / "checkpoint-4").iterdir()) == sorted(
        p.name for p in (tmp_path / "plain" / "checkpoint-4").iterdir()
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)
    assert type(loaded) is type(plain) and same(loaded, plain)
    settings = {"max_new_tokens": 6, "do_sample": False}
    found = resumed.model.eval().generate(TOKENS[:, :5], **settings)
    assert torch.equal(found, plain.eval().generate(TOKENS[:, :5], **settings))
    assert resumed.evaluate()["eval_loss"] == trainer(plain, tmp_path / "plain").evaluate()["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"bf16": True}, {"torch_compile": True}], ids=["bf16", "torch_compile"])
@pytest.mark.parametrize("how", ["wrapper", "callback"])
def test_trainer_options(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    plain = llama()
    trainer(plain, tmp_path / "plain", 2, **options if "bf16" in options else {}).train()
    callback = huggingface.MemoryBudget("90%", **QUICK)
    model = wrapped(llama()) if how == "wrapper" else llama()
    trainer(model, tmp_path / "ours", 2, [callback] if how == "callback" else None, **options).train()
    wrapper = model if how == "wrapper" else callback.wrapper
    assert isinstance(wrapper, AutoSchedule) and wrapper.record is not None
    assert same(model, plain)


@pytest.mark.slow
def test_a_wrapped_model_is_one_for_isinstance() -> None:
    model = llama()
    wrapper = wrapped(model)
    assert isinstance(wrapper, transformers.PreTrainedModel) and isinstance(wrapper, transformers.LlamaForCausalLM)
    assert isinstance(wrapper, AutoSchedule) and repr(wrapper).startswith("AutoSchedule(")
    assert not isinstance(wrapped(nn.Linear(2, 2)), nn.Linear)  # only what is told by its class
    for other in (pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper)):
        assert type(other) is AutoSchedule and same(other, model)
        other(input_ids=TOKENS, labels=TOKENS).loss.backward()


@pytest.mark.slow
def test_embeddings_can_be_resized() -> None:
    model, plain = wrapped(llama()), llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in (model, plain):
            one(input_ids=TOKENS, labels=TOKENS).loss.backward()
            one.zero_grad()
            one.resize_token_embeddings(72, mean_resizing=False)
            torch.manual_seed(1)
            nn.init.normal_(one.get_input_embeddings().weight)
            one(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert model.config.vocab_size == 72 and len(model.records) == 2
    assert torch.equal(model.lm_head.weight.grad, plain.lm_head.weight.grad)


def test_use_cache_needs_no_hand() -> None:
    """In training nothing is cached; in evaluation the model does what it does."""
    model = wrapped(llama(use_cache=True, num_hidden_layers=1))
    found = model(input_ids=TOKENS, labels=TOKENS)
    assert found.past_key_values is None
    found.loss.backward()
    assert model.eval()(input_ids=TOKENS).past_key_values is not None


@pytest.mark.slow
def test_gradient_checkpointing_is_said_not_to_count() -> None:
    """The same bytes have the same schedule; percentages are of the model's own step, with its checkpointing."""
    model, plain = llama(), wrapped(llama())
    plain(input_ids=TOKENS, labels=TOKENS)
    model.gradient_checkpointing_enable()
    both = wrapped(model, plain.record.budget_bytes)
    with pytest.warns(UserWarning, match="gradient checkpointing is on in LlamaForCausalLM and does not count") as told:
        both(input_ids=TOKENS, labels=TOKENS)
    assert [w.filename for w in told if "does not count" in str(w.message)] == [__file__]
    assert both.record.schedule == plain.record.schedule
    assert both.record.plain_peak_bytes < plain.record.plain_peak_bytes


@pytest.mark.slow
def test_an_adapter_is_saved_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = wrapped(peft.get_peft_model(llama(), peft.LoraConfig(r=2, task_type="CAUSAL_LM")).train())
    assert isinstance(model, peft.PeftModel)
    before = trainer(model, tmp_path, 2)
    before.train()
    before.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_config.json").exists()
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "saved")
    mine = {name: p for name, p in model.named_parameters() if "lora" in name}
    theirs = dict(loaded.named_parameters())
    assert mine and all(torch.equal(p, theirs[name]) for name, p in mine.items())
