"""Answers: what the Python code of a forward learns of the values of tensors, as in ``if (mask == 0).any():``.

A trace has no values. So a plain forward on the real inputs is asked first (`recorded_answers`), and the trace is given its
answers in the same order (`Given`). Each question is a node of the graph (`QUESTION`) and becomes a task of the program, which
asks again in every step: a step whose answers are others is another branch, and needs another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import CaptureError
from ..annotations import InPlaceCalls
from ..guards.recorder import Recorder
from ..guards.side_effects import keeping_tensors
from ..trees import flattened
from .known_values import KnownValues
from .undone import Undone

#: Operators whose results are Python values. PyTorch's other ones (``bool``, ``is_nonzero``, ``item``) call the first of these.
_QUESTIONS = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.allclose.default}
)
#: A forward that asks more often is taken for one that goes through its input element by element.
_MOST_QUESTIONS = 10_000

_library = torch.library.Library("monet_like_trace", "DEF")  # lives as long as this module
_library.define("question(Tensor[] tensors, int number) -> Tensor")
_library.impl("question", lambda tensors, number: tensors[0].new_empty(0), "CompositeExplicitAutograd")
torch.library.register_fake("monet_like_trace::question", lambda tensors, number: tensors[0].new_empty(0), lib=_library)
#: What a question is in a traced graph; its result, which holds nothing, is a result of the graph.
QUESTION = torch.ops.monet_like_trace.question.default


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and what was answered.

    Attributes:
        op: the operator that was asked, such as ``aten._local_scalar_dense.default``.
        looks: shape and dtype of each tensor that it was asked about.
        options: names and values of its further arguments.
        shown: the answer as text, which tells apart all numbers, and by which answers are compared: NaN equals NaN.
        value: the answer itself.
    """

    op: str
    looks: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    shown: str
    value: Any = field(compare=False)

    @property
    def question(self) -> tuple[Any, ...]:
        """All but the answer."""
        return self.op, self.looks, self.options


def _question(func: Any, tensors: Sequence[torch.Tensor], options: Mapping[str, Any]) -> tuple[Any, ...]:
    return str(func), tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), tuple(options.items())


class _Asked(TorchDispatchMode):
    """Notices questions."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _QUESTIONS:
            return func(*args, **kwargs)
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
        return self.answer(
            func, tensors, {name: each for name, each in given.items() if not isinstance(each, torch.Tensor)}
        )

    def answer(self, func: Any, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Recording(_Asked):
    """Writes down the answers of a plain forward."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []

    def answer(self, func: Any, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
        value = func(*tensors, **options)
        if len(self.answers) == _MOST_QUESTIONS:
            raise CaptureError(
                f"its Python code asks for values of tensors more than {_MOST_QUESTIONS:,} times; compute with tensors instead"
            )
        op, looks, named = _question(func, tensors, options)
        self.answers.append(Answer(op, looks, named, repr(value), value))
        return value


class Given(_Asked):
    """Gives recorded answers to a trace, and has the graph ask.

    Attributes:
        asked: results of the questions in the graph, to be results of the traced function.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__()
        self._answers = answers
        self.asked: list[torch.Tensor] = []

    def answer(self, func: Any, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
        number, question = len(self.asked), _question(func, tensors, options)
        if number == len(self._answers) or self._answers[number].question != question:
            raise CaptureError(
                f"its Python code asks for the values of other tensors in a trace than in a plain forward: question {number + 1} is "
                f"{question[0]} of {question[1]}"
            )
        self.asked.append(QUESTION(tensors, number))
        return self._answers[number].value

    def again(self, function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], None]]:
        """What a checkpointed function is called as in the backward, where it asks as before, and what is called when its forward ends."""
        start, found = len(self.asked), list[Answer]()

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            with _Again(found):
                return function(*args, **kwargs)

        return recomputed, lambda: found.extend(self._answers[start : len(self.asked)])

    def check_end(self) -> None:
        """Whether the trace asked all that the plain forward did.

        Raises:
            CaptureError: it asked less.
        """
        if len(self.asked) < len(self._answers):
            raise CaptureError(
                f"its Python code asks {len(self._answers)} times for values of tensors in a plain forward, and {len(self.asked)} "
                "times in a trace"
            )


class _Again(_Asked):
    """Gives the same answers again."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__()
        self._answers = iter(answers)

    def answer(self, func: Any, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
        return next(self._answers).value


@contextlib.contextmanager
def number_by_number(parameters: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Have a forward and its trace ask for the same numbers where PyTorch's own methods tell traced tensors from others.

    ``tolist`` asks for each element, and the text of a number, as in ``f"{loss:.3f}"``, for that number.

    Args:
        parameters: what a trace has in the place of parameters, whose text is not their number's.
    """
    traced: Any = FunctionalTensor  # has a ``tolist`` that asks below all modes
    own = traced.tolist
    traced.tolist = _tolist
    try:
        with _NumberByNumber(parameters):
            yield
    finally:
        traced.tolist = own


def _tolist(tensor: torch.Tensor) -> Any:
    return [_tolist(part) for part in tensor] if tensor.dim() else tensor.item()


class _NumberByNumber(TorchFunctionMode):
    """See `number_by_number`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._parameters = {id(parameter) for parameter in parameters}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "tolist" and len(args) == 1 and isinstance(args[0], torch.Tensor):
            return _tolist(args[0])
        if func is torch.Tensor.__format__ and self._formatted_by_value(args[0]):
            return format(args[0].detach().item(), *args[1:])
        return func(*args, **(kwargs or {}))

    def _formatted_by_value(self, tensor: torch.Tensor) -> bool:
        """Whether the text of a tensor is its number's, by PyTorch's own condition. Under a compiler nobody looks at values."""
        own_type = type(tensor) in (torch.Tensor, FunctionalTensor) and id(tensor) not in self._parameters
        return own_type and tensor.dim() == 0 and not tensor.is_meta and not torch.compiler.is_compiling()


def recorded_answers(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Answer, ...]:
    """The answers of a plain forward, which leaves no trace: buffers, inputs, attributes and generators are as before.

    Autograd builds its graph, because code may ask whether gradients are wanted, but saves no tensors; only a forward that calls
    for gradients itself has them saved.

    Args:
        args, kwargs: real tensors, and others.

    Raises:
        Exception: what the forward raises.
    """
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _unsaved):
            return _recorded(model, args, kwargs)
    except Exception:  # its own, which comes again, or for want of saved tensors
        try:
            return _recorded(model, args, kwargs)
        except Exception as error:
            error._raised_by_model = True  # type: ignore[attr-defined]
            raise


def raised_by_model(error: Exception) -> bool:
    """Whether a plain forward raised this: then a call of the plain model does so, too."""
    return getattr(error, "_raised_by_model", False)


def _unsaved(_: Any) -> Any:
    raise RuntimeError("no tensor was saved")


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Answer, ...]:
    leaves, _ = flattened((args, kwargs))
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers(), *inputs)), torch.device("cpu"))
    recording = _Recording()
    with (
        torch.enable_grad(),
        Undone(device, inputs),
        keeping_tensors(model),
        Recorder(model, others) as recorder,
        recorder.undone(),
        KnownValues(),
        InPlaceCalls(),
        number_by_number(),
        recording,
    ):
        model(*args, **kwargs)
    return tuple(recording.answers)
