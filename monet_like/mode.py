"""Mode strings: which variants a plan may use. The words are MONeT's, so its users find them.

``normal`` admits PyTorch's own operators and exact reruns. ``multiway`` adds gradients computed from the other
activation (output- instead of input-activated, and the reverse); ``newnode`` adds packed intermediates;
``conv`` adds algorithms that sum in another order: convolutions, and batch norm's gradient with that of its ReLU;
``inplace`` adds writing into dead inputs.
"""

from __future__ import annotations

import itertools

from .errors import UsageError

WORDS = ("inplace", "conv", "multiway", "newnode")
_NEUTRAL = "normal"

#: MONeT's twelve modes, which are also the mode strings this package names in its documentation.
MONET_MODES = tuple(
    prefix + rest
    for prefix, rest in itertools.product(
        ("", "inplace_"), ("normal", "conv_normal", "multiway", "newnode", "multiway_newnode", "conv_multiway_newnode")
    )
)


def parse_mode(text: str) -> frozenset[str]:
    """The variant words of a mode string such as ``inplace_conv_multiway_newnode``.

    Any combination of words is accepted, in any order; MONeT allowed twelve of them.

    Raises:
        UsageError: an unknown, repeated or missing word.
    """
    words = text.split("_")
    known = (*WORDS, _NEUTRAL)
    for word in words:
        if word not in known:
            raise UsageError(
                f"mode {text!r} has an unknown word {word!r}; a mode is some of {', '.join(known)} joined by '_', "
                "such as inplace_conv_multiway_newnode or normal"
            )
    if len(set(words)) != len(words):
        raise UsageError(f"mode {text!r} repeats a word; give each of {', '.join(known)} at most once")
    return frozenset(words) - {_NEUTRAL}
