"""What a forward sets and no call can set again: it is refused at the capture, or the call is plain PyTorch's."""

from __future__ import annotations

import collections
import copy
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from any_schedule import AnySchedule, OrPlain, step
from torch import nn

from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError


class Body(nn.Module):
    """Has a norm and a dropout, so that a second forward is seen; ``sets`` is called with what is inside."""

    def __init__(self, sets: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 8),
        )
        self.sets = sets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.first(x)).relu())
        self.sets(h)
        out: torch.Tensor = self.last(h)
        return out


def batch() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


# Refused when it is captured ----------------------------------------------------------------------------------------


class Unwilling:
    """An object that does not let itself be taken apart."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not this one")


class Unmade:
    """An object that can be taken apart and not be put together."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Unmade, ()


def numbers() -> Iterator[int]:
    yield 1


def closed_list(h: torch.Tensor) -> Any:
    mine: list[Any] = []
    return lambda value: mine.append(value)


def closed_twice(h: torch.Tensor) -> Any:
    def inner() -> Any:
        return h

    return lambda: inner


def generated(h: torch.Tensor) -> Any:
    return numbers()


NEVER: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "thread": (lambda h: threading.Thread(target=print), "what cannot be copied"),
    "file": (lambda h: Path("/dev/null").open(), "what cannot be copied"),  # noqa: SIM115
    "generator": (generated, "what cannot be copied"),
    "unwilling": (lambda h: Unwilling(), r"what cannot be copied \(not this one\)"),
    "unmade": (lambda h: Unmade(1), r"what cannot be copied \(.*missing 1 required positional argument"),
    "of a list": (closed_list, "a function that holds a list of one call"),
    "by default": (lambda h: lambda own=h: own, "a function that holds a tensor of the step"),
    "function of a function": (closed_twice, "a function that holds a tensor of the step"),
}


class Overlapping(nn.Module):
    """Changes an array before operators read a tensor that has its memory, or a copy of it."""

    def __init__(self, own: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.array = nn.Linear(8, 8), np.zeros((3, 8), np.float32)
        self.tensor = own(torch.from_numpy(self.array))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.array[1:] = 2
        out: torch.Tensor = self.first(x) * self.tensor
        return out


@pytest.mark.parametrize("own", [lambda t: t[1], lambda t: nn.Buffer(t[1]), lambda t: torch.from_numpy(t.numpy()[1])])
def test_an_array_with_the_memory_of_a_tensor_is_refused(own: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"sets self.array, an array whose memory a tensor of the model has"):
        capture(Overlapping(own), (batch(),))
    capture(Overlapping(lambda tensor: tensor[1].clone()), (batch(),))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("name", NEVER)
def test_what_no_call_can_set_again_is_refused_by_name(name: str) -> None:
    make, said = NEVER[name]
    seen: list[Any] = []

    def sets(h: torch.Tensor) -> None:
        seen.append(make(h))

    with pytest.raises(CaptureError, match=rf"Body\.forward sets .*\(variable seen\) to {said}"):
        capture(Body(sets), (batch(),))
    assert seen == []


def test_functions_of_what_was_there_are_set() -> None:
    scale, held = 2.0, [1]
    body = Body(lambda h: setattr(body, "latest", lambda value: (value * scale, held)))
    model = AnySchedule(body)
    step(model, batch())
    held.append(2)
    body.latest = None  # type: ignore[assignment]
    step(model, batch())
    assert body.latest(3) == (6.0, [1, 2])  # type: ignore[operator]


# Only some calls can ------------------------------------------------------------------------------------------------


class Switch:
    """Whether something is impossible now: where no guard looks."""

    _held = ctypes.c_bool()

    @property
    def on(self) -> bool:
        return self._held.value

    @on.setter
    def on(self, on: bool) -> None:
        self._held.value = on


SWITCH = Switch()


class Fixed(type):
    """A class of classes whose attributes may be fixed."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if SWITCH.on:
            raise AttributeError(f"{name} is fixed")
        super().__setattr__(name, value)


class Breaking:
    """Objects that cannot always be put together."""

    def __reduce__(self) -> Any:
        return made_again, ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Breaking)

    __hash__ = None  # type: ignore[assignment]


def made_again() -> Breaking:
    if SWITCH.on:
        raise KeyError(0)
    return Breaking()


class Hashed:
    """An object that a set cannot always take."""

    def __hash__(self) -> int:
        if SWITCH.on:
            raise TypeError("closed")
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed)


class Held:
    """What the forwards below set: all of it is as it was before each call."""

    def __init__(self) -> None:
        self.array, self.entries = np.zeros(2), {"made": 0, "members": {1}}
        self.of_class: Any = Fixed("OfClass", (), {"latest": None, "__module__": __name__})


def fill_array(held: Held) -> None:
    held.array[:] = 1


def set_class(held: Held) -> None:
    held.of_class.latest = 1


def make(held: Held) -> None:
    held.entries["made"] = Breaking()


def fill_set(held: Held) -> None:
    held.entries["members"] = {Hashed()}


#: What a forward sets, how it is put back, and whether the forward itself fails where it cannot be set again.
SOMETIMES: dict[str, tuple[Callable[[Held], None], Callable[[Held], Any], bool]] = {
    "array": (fill_array, lambda held: held.array.fill(0), True),
    "class": (set_class, lambda held: setattr(held.of_class, "latest", None), True),
    "object": (make, lambda held: held.entries.update(made=0), False),
    "set": (fill_set, lambda held: held.entries.update(members={1}), True),
}


def told(name: str, wrapped: bool) -> tuple[list[Any], list[str]]:
    """What four calls give and leave behind, before the third of which something becomes impossible; and warnings."""
    sets, put_back, _ = SOMETIMES[name]
    SWITCH.on = False
    held, log = Held(), [0]  # which holds one number before each call

    def both(h: torch.Tensor) -> None:
        log.append(h.shape[0])
        sets(held)

    body = Body(both)
    model = OrPlain(body) if wrapped else body
    notes: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(4):
            log[:] = [0]
            if call <= 2:
                put_back(held)
            SWITCH.on = call >= 2
            held.array.setflags(write=not SWITCH.on)
            try:
                notes.append(step(model, batch()).detach())
            except Exception as error:
                notes.append(f"{type(error).__name__}: {error}")
            notes += copy.deepcopy([dict(body.named_buffers()), log, list(held.array), held.entries["made"] == 0])
    notes += [[p.grad for p in body.parameters()], torch.get_rng_state()]
    return notes, [str(each.message) for each in caught]


@pytest.mark.parametrize("name", SOMETIMES)
def test_what_a_call_cannot_set_again_is_plain_pytorchs_to_do(name: str) -> None:
    """Nothing is computed twice: statistics, masks, what is set and errors are plain PyTorch's."""
    plain, _ = told(name, wrapped=False)
    ours, warned = told(name, wrapped=True)
    assert any(isinstance(note, str) for note in plain) is SOMETIMES[name][2]
    torch.testing.assert_close(
        [note for note in ours if not isinstance(note, str)],
        [note for note in plain if not isinstance(note, str)],
        rtol=0,
        atol=0,
    )
    assert [note for note in ours if isinstance(note, str)] == [note for note in plain if isinstance(note, str)]
    (message,) = warned
    assert message.startswith("Body runs as plain PyTorch when it is called with float32[6, 8]")
    assert "which could not be set again" in message


def test_a_deque_of_another_length_is_another_one() -> None:
    def script(model: Any, body: Any) -> list[Any]:
        found = []
        for most in (None, None, 2, 2, 3):
            body.latest = collections.deque([1, 2], maxlen=most)
            step(model, batch())
            found.append([*body.latest])
        return found

    def made() -> Any:
        body: Any = Body(lambda h: body.latest.append(3))
        return body

    bodies = [made(), made()]
    model = AnySchedule(bodies[1])
    assert script(model, bodies[1]) == script(bodies[0], bodies[0]) == [[1, 2, 3], [1, 2, 3], [2, 3], [2, 3], [1, 2, 3]]
    assert model.captures == 3


# Places ------------------------------------------------------------------------------------------------------------


def noting(log: list[int]) -> Callable[[int], None]:
    def note(rows: int) -> None:
        log.append(rows)

    return note


def test_what_the_backward_reads_moves_no_place() -> None:
    """Of two functions of one name, the hook reads one, which is not that of the forward."""
    first: list[int] = []
    second: list[int] = []

    class Two(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.box["within"][0](len(x))  # type: ignore[operator, index]
            h = self.first(x).relu()
            h.register_hook(lambda g: g * (1 if self.late is None else 2))
            out: torch.Tensor = self.last(h)
            return out

    body: Any = Two(print)
    body.box, body.late = {"within": [noting(first)]}, noting(second)
    model = AnySchedule(body)
    for _ in range(3):
        first.clear()
        step(model, batch())
        assert (first, second) == ([6], [])
    assert model.captures == 1
