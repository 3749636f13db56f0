"""Mode strings, which say what operator variants a plan may use. MONeT's words mean here what they mean there.

``normal`` admits PyTorch's own operators and exact reruns. ``multiway`` adds gradients computed from the other
activation (output- instead of input-activated, and the reverse); ``newnode`` adds packed intermediates;
``conv`` adds algorithms that sum in another order: convolutions, batch norm's gradient with that of its ReLU, and our
batch norm where PyTorch takes cuDNN's;
``inplace`` adds writing into dead inputs. All of these are exact but for rounding.

Three words admit lossy caches, each on its own: ``dropit0.9`` weight gradients from the largest tenth of a layer's
input, ``lowp16`` and ``lowp8`` values kept for the backward in 16 and 8 bits.

``offload`` admits copies on the host: exact to the bit, but what they take is counted apart. `monet_like.auto_schedule`
adds the word on a GPU where the step is shorter so.

``nhwc`` has convolutions compute in channels-last layout, whatever layout images and filters have: the results agree to
rounding, and so the program is another one. `monet_like.auto_schedule` adds the word where that is faster on a GPU.

``algorithms`` admits, on CUDA, what only measuring tells apart: cuDNN's convolution algorithms and the kinds of
attention. They agree to rounding, as with ``conv``.

Registered variants (`monet_like.register_variant`) may bring words of their own, which no mode has of itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import UsageError

WORDS = ("inplace", "conv", "multiway", "newnode")
#: Words that are off unless a mode names them; `DROPIT` is followed by the share of elements to drop.
LOSSY_WORDS = ("lowp16", "lowp8")
DROPIT = "dropit"
#: In no mode of itself either: values that wait for the backward on the host.
OFFLOAD = "offload"
#: Nor this: datasheet rates know no algorithms, and measuring all of them takes several times as long.
ALGORITHMS = "algorithms"
#: Nor this: it makes another program, and does not add to one.
NHWC = "nhwc"
_NEUTRAL = "normal"
#: Words of registered variants (`monet_like.register_variant`), and whether they admit inexact gradients.
_registered: dict[str, bool] = {}
_SHARE = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


def parse_mode(text: str) -> frozenset[str]:
    """Split a mode string such as ``inplace_conv_multiway_newnode`` into its words.

    Any combination of words is accepted, in any order; MONeT allowed twelve of them.

    Raises:
        UsageError: an unknown, repeated or missing word, or a share to drop outside [0, 1).
    """
    words = text.split("_")
    known = (*WORDS, _NEUTRAL)
    for word in words:
        if word.startswith(DROPIT):
            share = word.removeprefix(DROPIT)
            if not _SHARE.fullmatch(share) or dropit_share(word) >= 1:
                raise UsageError(
                    f"mode {text!r} drops {share!r} of the elements; give a share of at least 0 and below 1 after "
                    f"{DROPIT}, such as dropit0.9"
                )
        elif word not in (*known_words(), _NEUTRAL):
            raise UsageError(
                f"mode {text!r} has an unknown word {word!r}; a mode is some of {', '.join(known)} joined by '_', "
                "such as inplace_conv_multiway_newnode or normal; lossy caches are "
                f"{', '.join(LOSSY_WORDS)} and dropit0.9; {OFFLOAD} admits copies on the host, "
                f"{ALGORITHMS} those of cuDNN, {NHWC} has convolutions in channels-last; registered variants may have "
                "words of their own (here: "
                f"{', '.join(_registered) or 'none'})"
            )
    names = [DROPIT if word.startswith(DROPIT) else word for word in words]
    if len(set(names)) != len(names):
        every = ", ".join((*known, *LOSSY_WORDS, DROPIT, OFFLOAD, ALGORITHMS, NHWC))
        raise UsageError(f"mode {text!r} repeats a word; give each of {every} at most once")
    return frozenset(words) - {_NEUTRAL}


def known_words() -> tuple[str, ...]:
    """The words that a mode may have, but for ``dropit...`` and ``normal``."""
    return (*WORDS, *LOSSY_WORDS, OFFLOAD, ALGORITHMS, NHWC, *_registered)


def register_word(word: str, *, lossy: bool = False) -> None:
    """Make a mode word known, for a registered variant.

    Raises:
        UsageError: it is known already, or cannot be a word of a mode.
    """
    if word in (*known_words(), _NEUTRAL) or word.startswith(DROPIT):
        raise UsageError(f"mode word {word!r} is taken; give another one")
    if not re.fullmatch("[a-z][a-z0-9]*", word):
        raise UsageError(f"mode word {word!r} must be of small letters and digits: words are joined by '_'")
    _registered[word] = lossy


def forget_word(word: str) -> None:
    """Take a word of `register_word` out again."""
    del _registered[word]


def dropit_word(words: Iterable[str]) -> str | None:
    """The word among these that admits dropped activations (DropIT), if there is one."""
    return next((word for word in words if word.startswith(DROPIT)), None)


def dropit_share(word: str) -> float:
    """The share of elements that a DropIT word drops."""
    return float(word.removeprefix(DROPIT))


def is_lossy(mode: str) -> bool:
    """Whether a mode admits gradients that differ by more than rounding."""
    words = parse_mode(mode)
    lossy = {*LOSSY_WORDS, *(word for word, inexact in _registered.items() if inexact)}
    return dropit_word(words) is not None or not words.isdisjoint(lossy)
