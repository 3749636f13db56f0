"""Processes that have the fake GPU and have loaded PyTorch before they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import build

#: Answers to questions such as "train:unet", asked with variables of the environment: see ``train.py``.
Ask = Callable[..., list[dict[str, Any]]]


class Server:
    """``fake_gpu/train.py``, which loads PyTorch once and answers each question in a forked process."""

    def __init__(self, library: Path, errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(build.HERE / "train.py")], env=build.environment(library), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip

    def ask(self, *what: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
        """The answers, one after the other from one process, and what it wrote to stderr."""
        assert self._process.stdin is not None and self._process.stdout is not None
        before = self._errors.stat().st_size
        environment |= {"MONET_LIKE_CACHE": os.environ["MONET_LIKE_CACHE"]}
        print(json.dumps({"asked": what, "environment": environment}), file=self._process.stdin, flush=True)
        found: list[dict[str, Any]] = []
        while "ended" not in (line := json.loads(self._process.stdout.readline() or '{"ended": "the server has"}')):
            found.append(line)
        errors = self._errors.read_bytes()[before:].decode()
        assert line["ended"] == 0, errors[-4000:]
        return found, errors

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
