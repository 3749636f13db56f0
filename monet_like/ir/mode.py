"""Mode strings, which say what operator variants a plan may use. MONeT's words mean here what they mean there.

``normal`` admits PyTorch's own operators and exact reruns. ``multiway`` adds gradients computed from the other
activation (output- instead of input-activated, and the reverse); ``newnode`` adds packed intermediates;
``conv`` adds algorithms that sum in another order: convolutions, batch norm's gradient with that of its ReLU, and our
batch norm where PyTorch takes cuDNN's;
``inplace`` adds writing into dead inputs. All of these are exact but for rounding.

Three words admit lossy caches, each on its own: ``dropit0.9`` weight gradients from the largest tenth of a layer's
input, ``lowp16`` and ``lowp8`` values kept for the backward in 16 and 8 bits.

``offload`` admits copies on the host: exact to the bit, but what they take is counted apart.

``algorithms`` admits, on CUDA, what only measuring tells apart: cuDNN's convolution algorithms and the kinds of
attention. They agree to rounding, as with ``conv``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import UsageError

WORDS = ("inplace", "conv", "multiway", "newnode")
#: Words that are off unless a mode names them; `DROPIT` is followed by the share of elements to drop.
LOSSY_WORDS = ("lowp16", "lowp8")
DROPIT = "dropit"
#: As little in any mode of itself: values that wait for the backward on the host.
OFFLOAD = "offload"
#: Nor this: datasheet rates know no algorithms, and measuring all of them takes several times as long.
ALGORITHMS = "algorithms"
_NEUTRAL = "normal"
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
        elif word not in (*known, *LOSSY_WORDS, OFFLOAD, ALGORITHMS):
            raise UsageError(
                f"mode {text!r} has an unknown word {word!r}; a mode is some of {', '.join(known)} joined by '_', "
                "such as inplace_conv_multiway_newnode or normal; lossy caches are "
                f"{', '.join(LOSSY_WORDS)} and dropit0.9; {OFFLOAD} admits copies on the host, "
                f"{ALGORITHMS} those of cuDNN"
            )
    names = [DROPIT if word.startswith(DROPIT) else word for word in words]
    if len(set(names)) != len(names):
        every = ", ".join((*known, *LOSSY_WORDS, DROPIT, OFFLOAD, ALGORITHMS))
        raise UsageError(f"mode {text!r} repeats a word; give each of {every} at most once")
    return frozenset(words) - {_NEUTRAL}


def dropit_word(words: Iterable[str]) -> str | None:
    """The word among these that admits dropped activations (DropIT), if there is one."""
    return next((word for word in words if word.startswith(DROPIT)), None)


def dropit_share(word: str) -> float:
    """The share of elements that a DropIT word drops."""
    return float(word.removeprefix(DROPIT))


def is_lossy(mode: str) -> bool:
    """Whether a mode admits gradients that differ by more than rounding."""
    words = parse_mode(mode)
    return dropit_word(words) is not None or not words.isdisjoint(LOSSY_WORDS)
