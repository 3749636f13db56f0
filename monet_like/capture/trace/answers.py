"""Answers: what the Python code of a forward learns of the values of tensors, as in ``if (mask == 0).any():``.

A trace has no values. So a plain forward on the real inputs is asked first (`recorded_answers`), and the trace is given
its answers in the same order (`Given`). Each question is a node of the graph (`QUESTION`) and becomes a task of the
program, which asks again in every step: a step whose answers are others is another branch, and needs another program.
Sizes of results that depend on values are answers, too (`sizes`).
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
from ...runtime.questions import made_like
from ..annotations import InPlaceCalls
from ..guards.recorder import Recorder
from ..guards.side_effects import keeping_tensors
from ..replaced import replaced
from ..trees import flattened
from .alone import observed
from .known_values import KnownValues
from .sizes import Learned, deciding, kept, look_of, may_decide, numbered, traced, with_numbers
from .undone import Undone

#: Operators whose results are Python values. PyTorch's other ones (``bool``, ``is_nonzero``, ``item``) call the first
#: of these.
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
        value: the answer itself; of sizes how the results lie, or None where they depend on what is learned.
        examples: of sizes, by the places of the tensors that decide them, what these were.
    """

    op: str
    looks: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    shown: str
    value: Any = field(compare=False)
    examples: Mapping[int, torch.Tensor] | None = field(default=None, compare=False)

    @property
    def question(self) -> tuple[Any, ...]:
        """All but the answer."""
        return self.op, self.looks, self.options

    @property
    def is_size(self) -> bool:
        """Whether it is the size of an operator's results."""
        return self.examples is not None

    def __str__(self) -> str:
        return f"the {'size' if self.is_size else 'answer'} of {self.op.split('.')[1]}"


def _question(
    func: Any, tensors: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    return str(func), tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), tuple(options.items())


class _Asked(TorchDispatchMode):
    """Notices questions."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _QUESTIONS and not may_decide(func):
            return self.other(func, args, kwargs)
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if func not in _QUESTIONS:
            return self.size(func, given) if deciding(func, given) else self.other(func, args, kwargs)
        tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
        return self.answer(
            func, tensors, {name: each for name, each in given.items() if not isinstance(each, torch.Tensor)}
        )

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator that asks nothing."""
        return func(*args, **kwargs)

    def answer(self, func: Any, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
        """The answer to a question."""
        raise NotImplementedError

    def size(self, func: Any, given: dict[str, Any]) -> Any:
        """The result of an operator, whose size depends on values. ``given``: its arguments by name."""
        raise NotImplementedError


class _Recording(_Asked):
    """Writes down the answers of a plain forward.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self._learned = Learned(parameters)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self._learned.called(func, args, kwargs, result)
        return result

    def answer(self, func: Any, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
        value = func(*tensors, **options)
        self._write(Answer(*_question(func, tensors, options), repr(value), value))
        return value

    def size(self, func: Any, given: dict[str, Any]) -> Any:
        options, tensors = numbered(tuple(given.items()))
        asked, decide = _question(func, tensors, dict(options)), deciding(func, given)
        learned = any(map(self._learned.has, decide))
        examples = (
            {} if learned else {place: kept(t) for place, t in enumerate(tensors) if any(t is each for each in decide)}
        )
        result = self.other(func, (), given)
        results = result if isinstance(result, tuple) else (result,)
        looks = None if learned else tuple(map(look_of, results))
        self._write(Answer(*asked, repr([list(each.shape) for each in results]), looks, examples))
        return result

    def _write(self, answer: Answer) -> None:
        if len(self.answers) == _MOST_QUESTIONS:
            raise CaptureError(
                f"its Python code asks for values of tensors more than {_MOST_QUESTIONS:,} times; compute with tensors "
                "instead"
            )
        self.answers.append(answer)


class Given(_Asked):
    """Gives recorded answers to a trace, and has the graph ask.

    Attributes:
        asked: results of the questions in the graph, to be results of the traced function.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__()
        self._answers = answers
        self.asked: list[torch.Tensor] = []

    def _next(self, func: Any, tensors: list[torch.Tensor], options: Mapping[str, Any]) -> Answer:
        number, question = len(self.asked), _question(func, tensors, options)
        if number == len(self._answers) or self._answers[number].question != question:
            raise CaptureError(
                f"its Python code asks for the values of other tensors in a trace than in a plain forward: question "
                f"{number + 1} is {question[0]} of {question[1]}"
            )
        return self._answers[number]

    def _ask(self, tensors: Sequence[torch.Tensor]) -> None:
        self.asked.append(QUESTION(tensors, len(self.asked)))

    def _results(self, answer: Answer, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What an operator makes of the size that was answered."""
        return traced(tensors, len(self.asked), answer.value)

    def answer(self, func: Any, tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
        answer = self._next(func, tensors, options)
        self._ask(tensors)
        return answer.value

    def size(self, func: Any, given: dict[str, Any]) -> Any:
        options, tensors = numbered(tuple(given.items()))
        answer = self._next(func, tensors, dict(options))
        if answer.value is None:
            return func(**given)  # which neither a trace nor a fake tensor can
        results = self._results(answer, tensors)
        self._ask(results)
        return results[0] if len(func._schema.returns) == 1 else tuple(results)

    def check_end(self) -> None:
        """Whether the trace asked all that the plain forward did.

        Raises:
            CaptureError: it asked less.
        """
        if len(self.asked) < len(self._answers):
            raise CaptureError(
                f"its Python code asks {len(self._answers)} times for values of tensors in a plain forward, and "
                f"{len(self.asked)} times in a trace"
            )


class _Repeated(Given):
    """Gives recorded answers to a step on fake tensors, which has no graph."""

    def _ask(self, tensors: Sequence[torch.Tensor]) -> None:
        self.asked.append(_NOTHING)

    def _results(self, answer: Answer, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return made_like(answer.value, tensors[0])


#: In the place of results of questions.
_NOTHING = torch.empty(0)


@contextlib.contextmanager
def repeated(answers: Sequence[Answer]) -> Iterator[None]:
    """Give the answers of a plain forward to one on fake tensors, from within its fake mode."""
    with KnownValues(), number_by_number(), _Repeated(answers):
        yield


@contextlib.contextmanager
def number_by_number(parameters: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Have a forward and its trace ask for the same numbers where PyTorch's own methods tell traced tensors from
    others.

    ``tolist`` asks for each element, and the text of a number, as in ``f"{loss:.3f}"``, for that number. What is
    written by a mask is written by the numbers of its elements, which a gradient is read by then: a backward cannot
    ask. ``one_hot`` asks for the number of classes alone.

    Args:
        parameters: what a trace has in the place of parameters, whose text is not their number's.
    """
    # The ``tolist`` of functional tensors asks below all modes.
    with replaced(FunctionalTensor, tolist=_tolist), _NumberByNumber(parameters):
        yield


def _tolist(tensor: torch.Tensor) -> Any:
    return [_tolist(part) for part in tensor] if tensor.dim() else tensor.item()


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As PyTorch computes it in a trace; in a plain forward it asks for the least and the greatest number."""
    count = int(tensor.max().item()) + 1 if num_classes == -1 else num_classes
    return (tensor.unsqueeze(-1) == torch.arange(count, dtype=tensor.dtype, device=tensor.device)).long()


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
        if getattr(func, "__name__", "") == "one_hot":
            return _one_hot(*args, **(kwargs or {}))
        if func is torch.Tensor.__format__ and self._formatted_by_value(args[0]):
            return format(args[0].detach().item(), *args[1:])
        return func(*with_numbers(func, args), **(kwargs or {}))

    def _formatted_by_value(self, tensor: torch.Tensor) -> bool:
        """Whether the text of a tensor is its number's, by PyTorch's own condition.

        Under a compiler nobody looks at values.
        """
        own_type = type(tensor) in (torch.Tensor, FunctionalTensor) and id(tensor) not in self._parameters
        return own_type and tensor.dim() == 0 and not tensor.is_meta and not torch.compiler.is_compiling()


def recorded_answers(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Answer, ...]:
    """The answers of a plain forward, which leaves no trace: buffers, inputs, attributes and generators are as before.

    Autograd builds its graph, because code may ask whether gradients are wanted, but saves no tensors; only a forward
    that calls for gradients itself has them saved.

    Args:
        args, kwargs: real tensors, and others.

    Raises:
        Exception: what the forward raises.
    """
    return watched_forward(model, args, kwargs)[0]


def watched_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], begins: Callable[[], None] = lambda: None
) -> tuple[tuple[Answer, ...], Any]:
    """As `recorded_answers`, and the forward's result. ``begins`` is called before the forward."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _unsaved):
            return forward_undone(model, args, kwargs, begins)
    except Exception:  # its own, which comes again, or for want of saved tensors
        try:
            return forward_undone(model, args, kwargs, begins)
        except Exception as error:
            error._raised_by_model = True  # type: ignore[attr-defined]
            raise


def raised_by_model(error: Exception) -> bool:
    """Whether a plain forward raised this: then a call of the plain model does so, too."""
    return getattr(error, "_raised_by_model", False)


def _unsaved(_: Any) -> Any:
    raise RuntimeError("no tensor was saved")


def forward_undone(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], begins: Callable[[], None],
    call: Callable[..., Any] | None = None,
) -> tuple[tuple[Answer, ...], Any]:  # fmt: skip
    """As `watched_forward`; autograd's graph of the result is whole. ``call``: what calls the model, if not itself."""
    leaves, _ = flattened((args, kwargs))
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers(), *inputs)), torch.device("cpu"))
    recording = _Recording(model.parameters())
    with (
        observed(),
        torch.enable_grad(),
        Undone(device, [*inputs, *model.parameters(), *model.buffers()]),
        keeping_tensors(model),
        Recorder(model, others) as recorder,
        recorder.undone(),
        KnownValues(),
        InPlaceCalls(),
        number_by_number(),
        recording,
    ):
        begins()
        result = (call or model)(*args, **kwargs)
    return tuple(recording.answers), result
