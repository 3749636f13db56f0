"""Operator variants from outside the package (`register_variant`), and the order in which all variants are offered."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ..errors import UsageError
from ..ir.mode import DROPIT, forget_word, known_words, register_word
from .built_in import BUILT_IN
from .editor import Editor, Offer

Function = TypeVar("Function", bound=Offer)

#: The end of the order, for ``before``.
END = "end"


@dataclass(frozen=True)
class Plugin:
    """A registered variant.

    Attributes:
        name: with which the names of the variants that it adds begin.
        offer: the function that adds them to a program.
        before: the name of the variant before which it is offered.
        word: its own mode word; "": its tasks name words that exist.
        any_name: what it adds may be called anything, as no schedule will name it.
    """

    name: str
    offer: Offer
    before: str
    word: str
    any_name: bool = False

    def __call__(self, editor: Editor) -> None:
        """Offer the variants, and check the names and mode words of those that are new in the program."""
        if self.word and self.word not in editor.words:
            return
        former = {task.variant for task in editor.every_task()}
        self.offer(editor)
        known = ("", *known_words())
        for task in editor.every_task():
            if task.variant in former:
                continue
            if task.variant.partition(".")[0] != self.name and not self.any_name:
                raise UsageError(
                    f"variant {self.name} adds {task.name} as {task.variant!r}; what it adds must be called "
                    f"{self.name} or begin with it, such as {self.name}.packed"
                )
            if task.word not in known and not task.word.startswith(DROPIT):
                raise UsageError(
                    f"variant {self.name} adds {task.variant} with mode word {task.word!r}, which no mode has; give "
                    f"one of {', '.join(map(repr, known))}, or register it with word={task.word!r}"
                )


_plugins: dict[str, Plugin] = {}


def register_variant(
    offer: Function, *, name: str = "", before: str = "in_place", word: str = "", lossy: bool = False
) -> Function:
    """A function ``offer(editor)`` adds operator variants to every program that is captured from here on; also a
    decorator.

    Programs in which it finds nothing stay as they are, and so do their schedules. A schedule of a program to which it
    adds something can only be replayed where it is registered, too.

    Args:
        offer: the function, which is returned.
        name: of the variant; default: the function's, without ``offer_``. The names of what it adds, such as
            ``softshrink.packed``, begin with it.
        before: the name of the variant before which it is offered (`names`), or ``end``. By default it comes before the
            in-place forms, which look for what they can replace among all ways.
        word: a new mode word that admits it, such as ``softshrink`` in the mode ``inplace_softshrink``. Without one,
            what it adds names words that exist (``multiway``, ``newnode``, ``inplace``, ``conv``, ``algorithms``, or
            "").
        lossy: the new word admits gradients that differ by more than rounding.

    Raises:
        UsageError: the name or the word is taken, there is no variant ``before``, or the function does not take one
            argument, the editor.
    """
    chosen = name or _default_name(offer)
    if chosen in names():
        owner = f"by {_plugins[chosen].offer.__module__}" if chosen in _plugins else "in this package"
        advice = f", or unregister_variant({chosen!r}) first" if chosen in _plugins else ""
        raise UsageError(f"there is a variant {chosen!r} already, {owner}; give another name{advice}")
    if before not in (*names(), END):
        raise UsageError(f"there is no variant {before!r} to stand before; there are: {', '.join((*names(), END))}")
    if not chosen.replace("_", "").isalnum():
        raise UsageError(f"a variant's name has letters, digits and _ only, {chosen!r} has others")
    _check_signature(offer, chosen)
    if lossy and not word:
        raise UsageError(f"variant {chosen} is lossy, and so needs a mode word of its own: give word=")
    if word:
        register_word(word, lossy=lossy)
    _plugins[chosen] = Plugin(chosen, offer, before, word)
    return offer


def unregister_variant(name: str) -> None:
    """Take a registered variant, and its own mode word, out again.

    Raises:
        UsageError: no variant of this name has been registered, or another one was registered to stand before it.
    """
    if name not in _plugins:
        registered = ", ".join(_plugins) or "none"
        raise UsageError(f"no variant {name!r} has been registered; registered: {registered}")
    if others := [plugin.name for plugin in _plugins.values() if plugin.before == name]:
        raise UsageError(f"variant {others[0]} is registered to stand before {name}: unregister it first")
    if word := _plugins.pop(name).word:
        forget_word(word)


@contextmanager
def temporarily(offer: Offer | str, before: str) -> Iterator[str]:
    """During the body a function is registered, unless it is already; yields its name.

    Args:
        offer: the function, or the name of a variant.

    Raises:
        UsageError: as for `register_variant`; or no variant has this name.
    """
    if isinstance(offer, str):
        if offer not in names():
            raise UsageError(f"there is no variant {offer!r}; there are: {', '.join(names())}")
        yield offer
        return
    if known := [plugin.name for plugin in _plugins.values() if plugin.offer is offer]:
        yield known[0]
        return
    name = _default_name(offer)
    if before not in (*names(), END):
        raise UsageError(f"there is no variant {before!r} to stand before; there are: {', '.join((*names(), END))}")
    _check_signature(offer, name)
    name = f"{name} (not registered)"
    _plugins[name] = Plugin(name, offer, before, "", any_name=True)
    try:
        yield name
    finally:
        del _plugins[name]


def in_order() -> dict[str, Offer]:
    """All variants by name, the registered ones in their places.

    Of several before the same one, those that were registered later stand nearer to it.
    """
    order: dict[str, Offer] = dict(BUILT_IN)
    for plugin in _plugins.values():
        found: dict[str, Offer] = {}
        for name, offer in order.items():
            if name == plugin.before:
                found[plugin.name] = plugin
            found[name] = offer
        found.setdefault(plugin.name, plugin)
        order = found
    return order


def names() -> tuple[str, ...]:
    """The names of all variants, in the order in which they are offered."""
    return tuple(in_order())


def _default_name(offer: Offer) -> str:
    name = getattr(offer, "__name__", type(offer).__name__)
    if name == "offer":  # one to a module, as in this package
        name = offer.__module__.rpartition(".")[2].strip("_")
    return name.removeprefix("offer_")


def _check_signature(offer: Offer, name: str) -> None:
    try:
        inspect.signature(offer).bind(None)
    except TypeError as error:
        raise UsageError(f"variant {name} must be a function of one argument, the editor: {error}") from None
