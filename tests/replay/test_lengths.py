"""One plan serves inputs that are smaller in any dimension: the same decisions, after a capture of their own."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

import pytest
import torch
from block_models import Decoder, tokens
from replays import record_for
from torch import nn
from training import run, twin

from monet_like import ScheduleWrapper, auto_schedule
from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.errors import ScheduleFileError, UsageError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import Free, simulate
from monet_like.plan.random_schedules import random_schedule
from monet_like.variants import admitted


def decoder() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "labels": tokens}


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, ScheduleRecord, Captured]:
    model = decoder()
    example = (model, (), batch(3, 16))
    captured = admitted(capture(*example), "normal")
    schedule = random_schedule(captured.program, seed=1, drop=0.8, others=0.0)
    assert schedule.rerun_count > 10
    return model, record_for(captured, schedule, "normal", example), captured


def test_shorter_sequences_follow_the_same_decisions_exactly(
    planned: tuple[nn.Module, ScheduleRecord, Captured], caplog: pytest.LogCaptureFixture
) -> None:
    model, record, captured = planned
    wrapped = ScheduleWrapper(twin(model), record, example=((), batch(3, 16)), captured=captured)
    with caplog.at_level(logging.INFO, logger="monet_like"):
        for rows, length in ((3, 16), (2, 5)):
            wrapped.zero_grad()
            plain = run(twin(model), (), batch(rows, length))
            assert not any(plain.differences(run(wrapped, (), batch(rows, length))).values())
    (told,) = (line for line in caplog.messages if "by the schedule for" in line)
    assert told.startswith("test: int64[2, 5], int64[2, 5] by the ")


def test_longer_sequences_and_other_ranks_are_refused(planned: tuple[nn.Module, ScheduleRecord, Captured]) -> None:
    model, record, captured = planned
    wrapped = ScheduleWrapper(twin(model), record, example=((), batch(3, 16)), captured=captured)
    for rows, length in ((3, 17), (4, 5)):
        with pytest.raises(ScheduleFileError, match=r"smaller inputs \(a batch, a length\) are fine"):
            wrapped(**batch(rows, length))
    with pytest.raises(ScheduleFileError, match="the model was called with"):
        wrapped(**{name: tensor[0] for name, tensor in batch(3, 16).items()})


class Sizes(nn.Module):
    """Upsamples a short input more: its step needs more memory than the schedule promises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).repeat(1, 8192 // x.shape[1] ** 2, 1).sin().sum()


def test_smaller_inputs_that_need_more_memory_are_refused() -> None:
    example = (Sizes().train(), (torch.randn(2, 32, 4),), {})
    captured = admitted(capture(*example), "normal")
    schedule = random_schedule(captured.program, seed=0, drop=0.0, others=0.0)
    peak_bytes = simulate(captured.program, schedule, Free()).peak_bytes
    record = replace(record_for(captured, schedule, "normal", example), peak_bytes=peak_bytes)
    wrapped = ScheduleWrapper(example[0], record, example=example[1:])
    with pytest.raises(ScheduleFileError, match="whose results are larger"):
        wrapped(torch.randn(2, 4, 4))


@pytest.mark.slow
def test_lengths_are_planned_ahead_and_each_batch_follows_the_next_larger_one(caplog: pytest.LogCaptureFixture) -> None:
    plain = Decoder(blocks=2)
    mine = auto_schedule(twin(plain), memory_budget="85%", mode="normal", effort="quick", lengths=[8, 16])
    with caplog.at_level(logging.INFO, logger="monet_like"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows, length in ((16, 5), (16, 8), (12, 12), (16, 16)):
            given = (tokens(rows, length),)
            assert not any(run(plain, given, {}).differences(run(mine, given, {})).values())
    assert [record.inputs[0].shape for record in mine.records] == [(16, 16), (16, 8)]
    assert len({record.budget_bytes for record in mine.records}) == 1
    told = [line.partition(", captured")[0] for line in caplog.messages if "by the schedule for" in line]
    assert told == [
        "Decoder: int64[16, 5] by the schedule for int64[16, 8]",
        "Decoder: int64[12, 12] by the schedule for int64[16, 16]",
    ]
    with pytest.warns(UserWarning, match=r"planning Decoder anew: .*int64\[16, 17\]"):
        mine(tokens(16, 17))


def test_lengths_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match=r"lengths \[8, 0\] must be whole numbers of at least 1"):
        auto_schedule(nn.Linear(2, 2), lengths=[8, 0])
    with pytest.raises(UsageError, match="no input has one; leave lengths out"):
        auto_schedule(nn.Linear(2, 2).train(), torch.randn(2), lengths=[8])
