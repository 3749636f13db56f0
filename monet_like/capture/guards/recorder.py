"""Records the values beside tensors that a model's forward and backward read and set while they are traced.

What they set is put back afterwards; what the forward sets becomes `Effects`, which each replayed forward repeats.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError
from ..replaced import replaced
from .code import TRACING, Untraced, calls_trace, importing, is_tracers, names_read, words
from .effects import Assigned, Before, Effects, effects_of
from .holders import ABSENT, Attributes, Entries, Gradient, Variables
from .objects import class_holders, holders_of_tensor, is_library, set_by_pytorch
from .reads import MEMBERS, Reads, Roots
from .side_effects import check_cached
from .traversal import Place, Walk, form_of_plain, walk_through

#: Attributes of modules that the wrapper compares itself, or that PyTorch keeps about hooks.
_NOT_READ = frozenset(
    {*MEMBERS, "training", "_non_persistent_buffers_set", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"}
    | {"_forward_pre_hooks_with_kwargs", "_is_full_backward_hook", "_flat_weights", "_flat_weight_refs", "__class__"}
)

#: Where a forward sees to it that Python code runs in its backward; or else that is not traced, which is slow.
_FOR_BACKWARD = frozenset({"torch.autograd.function", "torch.autograd.graph", "torch.utils.checkpoint"})


class Recorder:
    """Records what a trace of ``model`` reads and sets, while it is entered.

    Args:
        arguments: of the call, those that are no tensors.

    Attributes:
        effects: what the last forward has set; None: nothing.
        marked: tensors on which it has set attributes, and these.
    """

    def __init__(self, model: nn.Module, arguments: Sequence[Any]) -> None:
        self.model, self.arguments = model, tuple(arguments)
        self.effects: Effects | None = None
        self.marked: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self.known = {id(module): name for name, module in model.named_modules()}
        self._known_parts = {id(module._modules): name for name, module in model.named_modules()}
        self.names: set[str] = set()
        self._read_names: set[str] = set()  # of `names`, those that are not only set
        self.late_names: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.late_attributes: dict[str, set[str]] = {}
        self.absent: dict[str, set[str]] = {}
        self.others: dict[int, tuple[nn.Module, set[str]]] = {}
        self.variables: dict[int, tuple[dict[str, Any], str, set[str], set[str]]] = {}  # the last: those that are read
        self.in_backward = self._python_in_backward = False
        self.held: set[tuple[str, int]] = set()  # see `Roots`
        self._codes: dict[int, types.CodeType] = {}  # entered, by identity
        self._entered: set[int] = set()  # of the code objects entered in this forward, or in this backward
        self._attributes_read: dict[int, set[str]] = {}  # likewise, by identity of a module
        self._modules: dict[int, nn.Module] = {}
        self._copies: list[tuple[Place, Any]] = []  # as it was before the trace
        self._attributes_before: dict[int, dict[str, Any]] = {}  # of these the modules', by identity
        self._after_forward: dict[int, Any] = {}  # by position among the copies
        self._in_arguments: list[tuple[Place, Any]] = []  # likewise copies, of containers among the arguments
        self._parts: set[str] = set()  # names of modules in which the forward has put others
        self._walk = Walk(self.names, self.known, lambda module: frozenset(), self._found)
        self._begin_arguments(())

    def __enter__(self) -> Recorder:
        for module in self.model.modules():
            self._walk.add(Attributes(module, module.__dict__, only=frozenset()), self._path(module))
            self._walk.add(Entries(module._modules), f"{self._path(module)}._modules")
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    for holder in holders_of_tensor(tensor, self.names):
                        self._walk.add(holder, f"{self._path(module)}.{name}")
                    self._walk.add(Gradient(tensor), f"{self._path(module)}.{name}")
        for position, argument in enumerate(self.arguments):
            self._walk.follow(argument, f"argument {position}")
        self._walk.run()
        self._tracer = sys.gettrace()
        self._reading = replaced(nn.Module, __getattribute__=self._patched())
        self._reading.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._tracer)
        self._reading.__exit__(None, None, None)
        self._put_back()

    def found(self, used: Collection[Any], effects: Effects | None) -> tuple[Reads, Effects | None]:
        """The guards of the trace, to be compared before every step, and what its forward sets at their places; call it
        after leaving.

        Args:
            used: tensors that an operator takes.
        """
        roots = self._roots(frozenset(map(id, used)))
        if effects is not None:
            effects.check_apart([*used, *self.model.parameters(), *self.model.buffers()])
            effects = effects.found_in(roots.walk(self.model))
            roots = replace(roots, set_again=effects.paths)
        return Reads(roots, self.model), effects

    def _roots(self, used: Set[int] | None = None) -> Roots:
        others = {key: of for key, of in self.others.items() if not is_tracers(*of)}
        return Roots(
            frozenset(self._read_names), self.attributes, self.absent, others,
            tuple((mapping, name, frozenset(read)) for mapping, name, _, read in self.variables.values()),
            self.arguments, frozenset(self.late_names), self.late_attributes, frozenset(self._parts), used, (),
            frozenset(self.effects.marks) if self.effects is not None else frozenset(), frozenset(self.held),
        )  # fmt: skip

    def begin(self) -> None:
        """Put everything back that the last forward and its backward have set."""
        if self.in_backward:
            self.check_backward()
        self._put_back()

    @contextlib.contextmanager
    def forward(self, given: Mapping[int, tuple[str, Any]], containers: Sequence[tuple[str, Any]]) -> Iterator[None]:
        """A call of the model: after `begin`; what follows it is its backward.

        Args:
            given: see `effects_of`.
            containers: those among the arguments, and their paths.

        Raises:
            CaptureError: it draws from a generator that is not PyTorch's own, or sets what cannot be set again.
        """
        self._begin(backward=False)
        self._begin_arguments(containers)
        sys.settrace(self._trace_function(self._tracer))
        with Untraced() as untraced:
            yield
        sys.settrace(self._tracer)
        self._python_in_backward |= untraced.hooked
        self._after_forward = {i: place.holder.copy() for i, (place, _) in enumerate(self._copies)}
        self.effects = self._effects(given, containers)
        self._begin_arguments(())  # the user's own objects among them hold the tracer's tensors no longer
        self._begin(backward=True)
        if self._python_in_backward:
            sys.settrace(self._trace_function(self._tracer))

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """A call of the model whose effects are put back, and nothing else."""
        sys.settrace(self._trace_function(self._tracer))
        with Untraced():
            yield
        sys.settrace(self._tracer)

    def _effects(self, given: Mapping[int, tuple[str, Any]], containers: Sequence[tuple[str, Any]]) -> Effects | None:
        """What the forward has set.

        Raises:
            CaptureError: it is drawn, or cannot be set again.
        """
        who = f"{type(self.model).__name__}.forward"
        sets = [*self._changes(who)]
        if not sets and not self.marked:
            return None
        filled = [(place.holder, place.holder.copy()) for place, _ in self._in_arguments]
        self._put_back()
        for place, copy in self._in_arguments:
            place.holder.put_back(copy)
        before = Before([self._roots().walk(self.model), walk_through(containers, frozenset(self._read_names))])
        for index, (place, copy) in enumerate([*self._copies]):
            if id(place.holder.held) in self._known_parts:  # where PyTorch's tracer finds its tensors, by name
                self._after_forward[index] = copy
            place.holder.put_back(self._after_forward.get(index, copy))
        for holder, copy in filled:
            holder.put_back(copy)
        found: list[Assigned] = []
        for place, content, paths in sets:  # objects that were not there are made anew with what holds them
            if (known := before.places.get((type(place.holder), id(place.holder.held)))) is not None:
                found.append(Assigned(known, content, paths))
        return effects_of(found, self.marked, before, given, who) if found or self.marked else None

    def _changes(self, who: str) -> Iterator[Assigned]:
        """What the forward has set. The places of modules in which it has are among the roots from here on."""
        names = {**self.known, **self._known_parts}
        for place, copy in (*self._copies, *self._in_arguments):
            held, own = place.holder.held, set_by_pytorch(place.holder.held)
            check_cached(place.holder, copy, who)
            paths = [path for path in place.holder.changed(place.path, copy) if path.rpartition(".")[2] not in own]
            if not paths:
                continue
            if place.holder.drawn:
                raise CaptureError(
                    f"{who} draws from {place.path}, or adds to it, and a schedule would not; do it outside "
                    "the model, and pass the number as an argument"
                )
            content = place.holder.difference(copy)
            if isinstance(held, torch.Tensor):
                self.marked.append((held, content))
                continue
            if isinstance(held, nn.Module):
                content = {name: value for name, value in content.items() if name not in own}
            if id(held) in names:
                self.attributes.setdefault(names[id(held)], set())
                self._parts |= set() if isinstance(held, nn.Module) else {names[id(held)]}
            yield Assigned(place, content, tuple(paths))

    def _begin_arguments(self, containers: Sequence[tuple[str, Any]]) -> None:
        """Watch containers among the arguments, which are others in each forward."""
        self._in_arguments = []
        found = lambda place: self._in_arguments.append((place, place.holder.copy()))  # noqa: E731
        self._argument_walk = Walk(self.names, self.known, lambda module: frozenset(), found)
        for path, value in containers:
            self._argument_walk.follow(value, path)

    def _begin(self, *, backward: bool) -> None:
        self.in_backward = backward
        self._entered.clear()
        self._attributes_read.clear()
        if not backward:
            self.marked = []

    def check_backward(self) -> None:
        """Whether hooks and custom functions have set nothing in the backward.

        Raises:
            CaptureError: they have, and a schedule's backward would not.
        """
        since = [(place, self._after_forward.get(i, copy)) for i, (place, copy) in enumerate(self._copies)]
        for path in (path for place, copy in since for path in place.holder.changed(place.path, copy)):
            raise CaptureError(
                f"a hook or a custom function of {type(self.model).__name__} sets {path} in the backward, and a "
                "schedule would not; register the hook on the wrapper's results or on parameters, compute it outside "
                "the model, or plan the parts without it: auto_schedule(model, blocks=[...])"
            )

    def watch(self, value: Any, path: str) -> bool:
        """Restore an object when the trace ends; False if it is of a class whose objects are not looked into."""
        self._follow(value, path)
        return any(place.holder.held is value for place, _ in self._copies)

    # Values that are set ----------------------------------------------------------------------------------------------

    def _found(self, place: Place) -> None:
        self._copies.append((place, place.holder.copy()))
        if isinstance(place.holder, Attributes) and isinstance(place.holder.held, nn.Module):
            self._attributes_before.setdefault(id(place.holder.held), self._copies[-1][1])

    def _put_back(self) -> None:
        for place, copy in self._copies:
            place.holder.put_back(copy)

    # Values that are read ---------------------------------------------------------------------------------------------

    def _path(self, module: nn.Module) -> str:
        name = self.known.get(id(module))
        return type(module).__name__ if name is None else f"self.{name}".rstrip(".")

    def _patched(self) -> Any:
        own, known = nn.Module.__getattribute__, self._attributes_read  # perhaps somebody's
        thread, mine = threading.get_ident, threading.get_ident()

        def read(module: Any, attribute: str) -> Any:
            if thread() != mine:
                return own(module, attribute)
            try:
                value = own(module, attribute)
            except AttributeError:
                self._read_absent(module, own(module, "__dict__"), attribute)
                raise
            if (names := known.get(id(module))) is None:
                self._modules[id(module)] = module  # one that lives no more would share its identity
                names = known[id(module)] = set(_NOT_READ if id(module) in self.known else _NOT_READ - {"training"})
            if attribute not in names:
                if attribute != "__dict__":
                    names.add(attribute)
                self._read(module, own(module, "__dict__"), attribute, value)
            return value

        return read

    def _read(self, module: Any, attributes: dict[str, Any], attribute: str, value: Any) -> None:
        name = self.known.get(id(module))
        before = self._attributes_before.get(id(module))
        if before is not None and attribute in attributes and before.get(attribute, ABSENT) is not value:
            self._follow(value, f"{self._path(module)}.{attribute}")  # this forward has set it
            if isinstance(getattr(type(module), attribute, None), functools.cached_property):
                self._read_absent(module, before, attribute)
            return
        if name is not None:
            found = self.attributes.setdefault(name, set())
            if self.in_backward:
                self.late_attributes.setdefault(name, set()).add(attribute)
        elif type(module).__module__ in TRACING:
            return
        else:
            found = self.others.setdefault(id(module), (module, set()))[1]
        if attribute in found:
            return
        if attribute in attributes:
            found.add(attribute)
            self._follow(value, f"{self._path(module)}.{attribute}", hooks=attribute.endswith("_hooks"))
        elif attribute == "__dict__":
            if not is_library(sys._getframe(2).f_globals.get("__name__")):  # a user's vars(self)
                for each in [each for each in attributes if each not in _NOT_READ]:
                    self._read(module, attributes, each, attributes[each])
                for each in self.names - attributes.keys():
                    self._read_absent(module, attributes, each)
        elif is_library(type(module).__module__):
            found.add(attribute)  # of the class, until the module has one
        else:
            found.add(attribute)
            self._read_names.add(attribute)
            self._add_names({attribute})
            for holder in class_holders(type(module), self.names):
                self._walk.add(holder, "")
            self._walk.run()

    def _read_absent(self, module: Any, attributes: dict[str, Any], attribute: str) -> None:
        name = self.known.get(id(module))
        if name is not None and not any(attribute in attributes.get(kind, ()) for kind in MEMBERS):
            self.absent.setdefault(name, set()).add(attribute)

    def _follow(self, value: Any, path: str, *, hooks: bool = False) -> None:
        if form_of_plain(value) is None and not isinstance(value, torch.Tensor | nn.Module):
            self._walk.follow(value, path, hooks=hooks)

    def _trace_function(self, others: Any) -> Any:
        """Trace function that Python calls for every function that is entered."""
        entered = self._entered

        def alone(frame: types.FrameType, event: str, argument: Any) -> Any:
            if id(frame.f_code) not in entered:
                self._new_code(frame, frame.f_code)

        def beside_others(frame: types.FrameType, event: str, argument: Any) -> Any:
            alone(frame, event, argument)
            local = others(frame, event, argument)  # a debugger, or a measure of coverage
            if sys.gettrace() is not beside_others:
                sys.settrace(beside_others)
            return local

        return alone if others is None else beside_others

    def _new_code(self, frame: types.FrameType, code: types.CodeType) -> None:
        python_module = frame.f_globals.get("__name__")
        if not is_library(python_module) and (importing(frame) or calls_trace(frame)):
            return
        self._codes[id(code)] = code
        self._entered.add(id(code))
        if is_library(python_module):
            self._python_in_backward |= python_module in _FOR_BACKWARD
            return
        own = {*code.co_freevars, code.co_name, *words(code.co_consts)}
        names, read = {*code.co_names, *own}, names_read(code)
        self._read_names |= read | own
        if self.in_backward:
            self.late_names |= names - {code.co_name}
        known = self.variables.get(id(frame.f_globals))
        if known is None:
            known = self.variables[id(frame.f_globals)] = (frame.f_globals, str(python_module), set(), set())
            self._walk.add(Variables(known[0], known[0], known[1], known[2]), known[1])
        new = set(code.co_names) - known[2]
        known[2].update(new)
        known[3].update(read)
        for name in new & frame.f_globals.keys():
            self._walk.form(frame.f_globals[name], f"{python_module}.{name}")
        self._add_names(names)
        self._walk.run()

    def _add_names(self, names: Set[str]) -> None:
        """Attributes of these names are read of objects that were found before, too."""
        new = names - self.names
        if not new:
            return
        self.names |= new
        for place, walk in [
            *((p, self._walk) for p, _ in self._copies),
            *((p, self._argument_walk) for p, _ in self._in_arguments),
        ]:
            holder = place.holder
            if isinstance(holder, Attributes) and not isinstance(holder.held, nn.Module | dict):
                now = holder.now()
                found = holder.contents(new) if holder.only is None else {name: now[name] for name in new & now.keys()}
                for name, value in found.items():
                    walk.form(value, holder.part(place.path, name))
        self._walk.run()
        self._argument_walk.run()
