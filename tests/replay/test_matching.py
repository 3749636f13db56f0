"""A schedule runs only with the model that it was planned for: the same operators, at sizes that keep its promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from training import run, twin

import monet_like
from monet_like import ScheduleWrapper
from monet_like.capture.lower.step import capture
from monet_like.compiler.request import Request, captured_for
from monet_like.compiler.sources import Given
from monet_like.errors import ScheduleFileError, UsageError
from monet_like.ir.program import RESIDENT_KINDS, Program, Ref, Task, refs
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.job.job import Job
from monet_like.profile.devices import DEVICES
from monet_like.variants import admitted

CPU = torch.device("cpu")


class Net(nn.Module):
    """A net whose activations grow by a literal; its classes and its buffer by arguments."""

    def __init__(self, classes: int = 10, factor: int = 3, entries: int = 3) -> None:
        super().__init__()
        self.factor = factor
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, classes)
        self.register_buffer("scale", torch.ones(entries))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).relu().repeat_interleave(self.factor, dim=2)
        return self.head(x.sigmoid().mean((2, 3))) * self.scale.mean()


def planned(model: nn.Module, optimizer: str = "none") -> ScheduleRecord:
    example = ((torch.randn(4, 3, 16, 16),), {})
    request = Request(model, example, "normal", "net", strategy="store_all", optimizer=optimizer)
    return Job(request, CPU, Given(DEVICES["cpu"])).plan(2**40).record


@pytest.fixture(scope="module")
def record() -> ScheduleRecord:
    return planned(Net().train())


def renamed(program: Program) -> Program:
    """A program that is another's but for the names of what the trace makes, as one of another device is."""

    def named(leaf: Any) -> Any:
        if isinstance(leaf, tuple | list):
            return type(leaf)(map(named, leaf))
        return Ref(f"other_{leaf.name}") if isinstance(leaf, Ref) and isinstance(leaf.name, str) else leaf

    def task(task: Task) -> Task:
        calls = (replace(call, args=named(call.args), outs=named(call.outs)) for call in task.calls)
        return replace(task, name=f"other_{task.name}", calls=tuple(calls))

    own = {*program.tangents, *(v for v, value in enumerate(program.values) if value.kind in RESIDENT_KINDS)}
    values = [v if i in own else replace(v, name=f"other_{v.name}") for i, v in enumerate(program.values)]
    slots = tuple(tuple(map(task, slot)) for slot in program.slots)
    return replace(program, values=tuple(values), tasks=tuple(map(task, program.tasks)), slots=slots)


def test_names_of_what_the_trace_makes_are_no_part_of_the_fingerprint() -> None:
    program = admitted(capture(Net().train(), (torch.randn(4, 3, 16, 16),)), "inplace_conv_multiway_newnode").program
    other = renamed(program)
    assert other != program and any(
        isinstance(ref.name, str) for t in other.every_task() for c in t.calls for ref in refs(c)
    )
    assert other.fingerprint == program.fingerprint
    parameter = next(i for i, value in enumerate(program.values) if value.kind == "parameter")
    values = list(program.values)
    values[parameter] = replace(values[parameter], name="another")
    assert replace(program, values=tuple(values)).fingerprint != program.fingerprint


class Layers(nn.Module):
    """Operators in one order, with arguments that can be others."""

    def __init__(self, stride: int = 1, window: int = 2, approximate: str = "none", turned: bool = False) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 8, 3, stride, 1), nn.MaxPool2d(window)
        self.act, self.turned = nn.GELU(approximate), turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.pool(self.conv(x)))
        y = x.sigmoid()
        return y - x if self.turned else x - y


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (Net(), [Net(classes=50_000), Net(entries=4), Net().double(), Net().to(memory_format=torch.channels_last)]),
        (Layers(), [Layers(stride=2), Layers(window=3), Layers(approximate="tanh"), Layers(turned=True)]),
    ],
    ids=["parameters and buffers", "arguments"],
)
def test_the_fingerprint_knows(own: nn.Module, others: list[nn.Module]) -> None:
    x = torch.randn(4, 3, 16, 16)
    programs = [capture(model.train(), (x.to(next(model.parameters()).dtype),)).program for model in (own, *others)]
    assert len({program.fingerprint for program in programs}) == len(programs)
    if isinstance(own, Layers):
        assert len({tuple(call.op for t in program.every_task() for call in t.calls) for program in programs}) == 1


def test_a_head_of_another_size_is_refused(record: ScheduleRecord) -> None:
    with pytest.raises(ScheduleFileError) as caught:
        ScheduleWrapper(
            Net(classes=200_000).train(), replace(record, versions={"torch": "2.1.0"}, device="roofline:cpu")
        )
    assert str(caught.value) == (
        "this schedule does not match the model: it was planned for net with 4 parameters in 1.2 KB and 9 operators in "
        "its backward, Net has 4 parameters in 6.9 MB and 9 operators in its backward; use the model that it was "
        "planned for, with the same frozen parameters, train/eval flags, precision, inputs that are one tensor, and "
        f"versions (planned with torch 2.1.0 for roofline:cpu; this is torch {torch.__version__}), or plan again with "
        "monet-like solve"
    )


class Rotary(nn.Module):
    """Tokens, with frequencies in a buffer that is float32 in a model of any dtype, unless the model is cast."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8, dtype=dtype), nn.Linear(8, 9, dtype=dtype)
        self.register_buffer("frequencies", torch.linspace(1, 2, 8))

    def forward(
        self, tokens: torch.Tensor, scale: torch.Tensor | None = None, shift: torch.Tensor | None = None
    ) -> Any:
        x = self.embedding(tokens)
        x = self.head((x.float() * self.frequencies.float()).to(x.dtype))
        x = x if scale is None else x * scale
        return x if shift is None else x + shift


def of_tokens(model: nn.Module, **named: torch.Tensor) -> ScheduleRecord:
    example = ((torch.zeros(2, 4, dtype=torch.long),), named)
    request = Request(model.train(), example, "normal", "tokens", strategy="store_all")
    return Job(request, CPU, Given(DEVICES["cpu"])).plan(2**40).record


def test_a_model_in_another_dtype_is_told() -> None:
    """A copy that was cast has a schedule of its own; buffers that only the cast converts are named."""
    half = Rotary().to(torch.bfloat16)
    mine = of_tokens(half)
    ScheduleWrapper(Rotary().to(torch.bfloat16).train(), mine)
    for record, model in ((mine, Rotary()), (of_tokens(Rotary()), half)):
        with pytest.raises(
            ScheduleFileError, match=r"; its parameters seem to have another dtype: .* convert the model first"
        ):
            ScheduleWrapper(model.train(), record)
    for record, model, sizes in (
        (mine, Rotary(torch.bfloat16), "take 32 B and took 16 B"),
        (of_tokens(Rotary(torch.bfloat16)), half, "take 16 B and took 32 B"),
    ):
        with pytest.raises(
            ScheduleFileError, match=f"; its buffers {sizes}: .* make the model in the same way as when"
        ):
            ScheduleWrapper(model.train(), record)


def test_arguments_by_keyword_are_told() -> None:
    record, model = of_tokens(Rotary(), shift=torch.ones(9)), Rotary().train()
    with pytest.raises(
        ScheduleFileError, match=r"so its 2 inputs were taken to be the first .* give ScheduleWrapper example="
    ):
        ScheduleWrapper(model, record)
    ScheduleWrapper(model, record, example=((torch.zeros(2, 4, dtype=torch.long),), {"shift": torch.ones(9)}))


def test_equal_parameters_and_another_program(record: ScheduleRecord) -> None:
    model = Net()
    model.conv.requires_grad_(False)
    with pytest.raises(ScheduleFileError, match="with the same frozen parameters, train/eval flags"):
        ScheduleWrapper(model.train(), record)


@pytest.mark.parametrize("optimizer", ["none", "adam"])
def test_a_literal_that_makes_results_larger_is_refused(optimizer: str) -> None:
    record = planned(Net().train(), optimizer)
    larger = Net(factor=9).train()
    promised = record.peak_bytes - record.optimizer_bytes
    with pytest.raises(ScheduleFileError) as caught:
        ScheduleWrapper(larger, record)
    assert str(caught.value).startswith(
        "this schedule does not match the model: it promises net a peak of "
        f"{promised / 1024:.1f} KB ({promised} bytes), and Net needs "
    )
    assert str(caught.value).endswith(
        "with the same operators, whose results are larger; plan again with monet-like solve"
    )


def test_smaller_results_are_replayed_exactly(record: ScheduleRecord) -> None:
    """A smaller batch, and a smaller literal: they need less than was promised."""
    for model, batch in ((Net(), 3), (Net(factor=2), 4)):
        torch.manual_seed(1)
        model, x = model.train(), torch.randn(batch, 3, 16, 16)
        plain = run(twin(model), (x,), {})
        assert set(plain.differences(run(ScheduleWrapper(model, record), (x,), {})).values()) == {0.0}


def test_a_schedule_planned_for_a_gpu_runs_on_a_cpu_and_one_without_a_promise_runs(record: ScheduleRecord) -> None:
    model = Net().train()
    with pytest.warns(UserWarning, match="a GPU and a CPU differ"):
        ScheduleWrapper(model, replace(record, device="cuda: NVIDIA H100 80GB HBM3"))
    ScheduleWrapper(model, replace(record, peak_bytes=0))
    with pytest.raises(ScheduleFileError, match="it promises net a peak of"):
        ScheduleWrapper(model, replace(record, peak_bytes=record.optimizer_bytes + 1))


@pytest.mark.slow
def test_auto_schedule_plans_anew_for_larger_results(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path))
    model = Net().train()
    wrapped = monet_like.auto_schedule(model, memory_budget="100 MB", time_limit_seconds=1.0)
    x = torch.randn(4, 3, 16, 16)
    wrapped(x).sum().backward()
    model.factor = 9
    with pytest.warns(UserWarning, match="planning Net anew"):
        wrapped(x).sum().backward()
    assert len(wrapped.records) == 2
    assert wrapped.records[1].peak_bytes > wrapped.records[0].peak_bytes


def test_a_fingerprint_is_that_of_every_batch() -> None:
    model = Net().train()
    found = {
        captured_for(Request(model, example, "normal"), example).program.fingerprint
        for example in (((torch.randn(n, 3, 16, 16),), {}) for n in (2, 5, 7))
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "quint8"}, {"dtype": "int64", "requires_grad": True}, {"shape": (2**70,)}, {"shape": (4, 2**62)}],
)
def test_an_input_that_cannot_be_made(record: ScheduleRecord, changes: dict[str, object]) -> None:
    (spec,) = record.inputs
    with pytest.raises(
        ScheduleFileError, match=r"the schedule's input .* cannot be made: |the schedule was solved for "
    ):
        ScheduleWrapper(Net().train(), replace(record, inputs=(replace(spec, **changes),)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"time_limit_seconds": float("inf")}, "time_limit_seconds inf must be more than 0 and at most"),
        ({"time_limit_seconds": float("nan")}, "time_limit_seconds nan must be more than 0 and at most"),
        ({"memory_budget": 10**400}, "memory_budget must be at most 9223372036854775807 bytes"),
        ({"memory_budget": "9" * 400 + "%"}, "must be more than 0 % and at most 1000 %"),
        ({"memory_budget": "9" * 400}, "is more than any memory"),
    ],
)
def test_numbers_beyond_any_machine(
    options: dict[str, object], expected: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        monet_like.auto_schedule(Net().train(), torch.randn(2, 3, 8, 8), **options)
    assert expected in str(caught.value)
