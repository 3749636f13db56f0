"""The fake GPU's server, one for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_gpu.server import Ask, Server


@pytest.fixture(scope="session")
def server(fake_gpu_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(fake_gpu_library, tmp_path_factory.mktemp("fake_gpu_server") / "errors")
    yield found
    found.end()


@pytest.fixture
def ask(server: Server) -> Ask:
    """Answers of ``fake_gpu/train.py``."""
    return lambda *what, **environment: server.ask(*what, **environment)[0]
