"""Reports: a schedule as pictures, in one page."""

from .command import report

__all__ = ["report"]
