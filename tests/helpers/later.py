"""Packages that take seconds to import, for tests that may be left out: each test process collects all modules."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """A package that is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks everything in a module whether it is a test
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
