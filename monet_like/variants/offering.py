"""Offers variants to a program.

One that fails there is left out with a warning, since a program is complete without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..capture.captured import Captured
from ..errors import MonetError, UsageError, warn_caller
from .editor import Editor, Offer

#: How the warning begins; the project's own tests make an error of it.
LEFT_OUT = "operator variant"


def with_offers(editor: Editor, offers: Mapping[str, Offer]) -> Captured:
    """The program with all variants, except those that raise an error here or make it malformed.

    Raises:
        UsageError: a registered variant gives its additions a wrong name or mode word.
    """
    found = editor.copy()
    try:
        for offer in offers.values():
            offer(found)
        return found.finish()
    except UsageError:
        raise
    except Exception:  # of any kind: a variant may be a function from outside the package
        return _one_by_one(editor, offers)


def _one_by_one(editor: Editor, offers: Mapping[str, Offer]) -> Captured:
    """As `with_offers`, with a look at the program after each variant."""
    result = editor.finish()
    for name, offer in offers.items():
        found = editor.copy()
        try:
            offer(found)
            result = found.finish()
        except UsageError:
            raise
        except Exception as error:
            what = str(error) if isinstance(error, MonetError) else f"{type(error).__name__}: {error}"
            warn_caller(
                f"{LEFT_OUT} {name} is left out of this program, where it fails ({what}). The step is exact without "
                "it, but may take more time or memory. Please report this with the model"
            )
        else:
            editor = found
    return result
