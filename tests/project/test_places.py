"""Where files are written: links, devices, pipes, folders that cannot be written to, and two processes at once."""

from __future__ import annotations

import contextlib
import os
import pty
import runpy
import socket
import stat
import subprocess
import sys
import threading
import time
import tty
import warnings
from pathlib import Path

import pytest
import torch
from chain import chain
from processes import in_processes
from torch import nn

import monet_like
from monet_like.auto.kept_plans import KeptPlan
from monet_like.compiler import sources
from monet_like.errors import UsageError
from monet_like.files import check_writable, write_atomically
from monet_like.ir.profile_file import Profile
from monet_like.ir.schedule_file import ScheduleRecord

ROOT = Path(__file__).resolve().parents[2]


def test_a_character_device_is_written_to_and_stays() -> None:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    path = Path(os.ttyname(theirs))
    check_writable(path)
    write_atomically(path, b"content")
    assert os.read(ours, 100) == b"content"
    assert stat.S_ISCHR(path.stat().st_mode)
    os.close(ours)
    os.close(theirs)


def test_the_null_device_takes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        path.symlink_to("/dev/null")
    write_atomically(path, b"content")
    assert stat.S_ISCHR(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["null"]


def test_a_pipe_is_written_to_while_somebody_reads(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    check_writable(path)
    with pytest.raises(UsageError, match="pipe: nobody reads from it"):
        write_atomically(path, b"content")
    content = bytes(range(250)) * 4000  # more than a pipe holds at once
    reader = subprocess.Popen(["cat", path], stdout=subprocess.PIPE)
    writer = threading.Thread(target=lambda: _until_read(path, content))
    writer.start()
    assert reader.communicate(timeout=60)[0] == content
    writer.join()
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def _until_read(path: Path, content: bytes) -> None:
    for _ in range(1000):  # until the reader has begun
        with contextlib.suppress(UsageError):
            return write_atomically(path, content)
        time.sleep(0.01)


def test_a_pipe_of_the_shell_is_written_to() -> None:
    reading, writing = os.pipe()
    write_atomically(Path(f"/dev/fd/{writing}"), b"content")
    assert os.read(reading, 100) == b"content"
    os.close(reading)
    os.close(writing)


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for write in (check_writable, lambda path: write_atomically(path, b"content")):
            with pytest.raises(UsageError, match="cannot write socket: it is a socket; give the name of a file"):
                write(Path("socket"))
    assert stat.S_ISSOCK(os.stat("socket").st_mode)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "file"
    target.write_bytes(b"old")
    for name, leads_to in (("absolute", target), ("relative", Path("real/file")), ("second", Path("relative"))):
        (tmp_path / name).symlink_to(leads_to)
        check_writable(tmp_path / name)
        write_atomically(tmp_path / name, name.encode())
        assert (tmp_path / name).is_symlink()
        assert target.read_bytes() == name.encode()
    (tmp_path / "dangling").symlink_to("new/file")
    write_atomically(tmp_path / "dangling", b"made")
    assert (tmp_path / "new" / "file").read_bytes() == b"made"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=r"loop: .*symbolic links"):
        write_atomically(tmp_path / "loop", b"content")
    assert sorted(os.listdir(tmp_path / "real")) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(UsageError, match="Permission denied; choose another place"):
        check_writable(tmp_path / "file")
    tmp_path.chmod(0o755)


# The cache ------------------------------------------------------------------------------------------------------


def step(model: nn.Module) -> None:
    model(torch.randn(2, 3, 16, 16)).sum().backward()


@pytest.mark.slow
def test_planning_goes_on_without_a_cache_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be written to: its name is a file's. (Root may write into a folder that is read-only.)"""
    (tmp_path / "cache").touch()
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "_unwritable", set())
    with pytest.warns(UserWarning, match="plans are not kept") as caught:
        step(monet_like.auto_schedule(chain(), memory_budget="1 GB", time_limit_seconds=2.0))
    (warning,) = (w for w in caught if "plans are not kept" in str(w.message))
    assert str(tmp_path / "cache") in str(warning.message)
    assert "$MONET_LIKE_CACHE" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(monet_like.auto_schedule(chain(), memory_budget="2 GB", time_limit_seconds=2.0))


@pytest.mark.slow
def test_a_damaged_profile_in_the_cache_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path))
    step(monet_like.auto_schedule(chain(), memory_budget="1 GB", time_limit_seconds=2.0))
    (store,) = tmp_path.glob("profile_*.json")
    store.write_text("{")
    for kept in tmp_path.glob("plan_*.json"):
        kept.write_bytes(b"no schedule")
    with pytest.warns(UserWarning, match=r"Sequential is planned anew: .*plan_.* is no whole plan: no JSON"):
        step(monet_like.auto_schedule(chain(), memory_budget="1 GB", time_limit_seconds=2.0))
    assert Profile.load(store).costs
    (kept,) = tmp_path.glob("plan_*.json")
    KeptPlan.load(kept)


def _plan(rank: int, folder: Path) -> None:
    """The first two processes plan by `auto_schedule`, the others by solve.py into one file."""
    os.chdir(folder)
    if rank < 2:
        torch.manual_seed(0)
        model = monet_like.auto_schedule(chain(), memory_budget="1 GB", time_limit_seconds=2.0)
        model(torch.ones(2, 3, 16, 16)).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        Path(f"gradients_{rank}").write_text(str(sum(float(g.double().sum()) for g in gradients)))  # type: ignore[union-attr]
        return
    net = f"{ROOT / 'tests' / 'helpers' / 'chain.py'}:chain"
    sys.argv = ["solve.py", net, "1", "1", "normal", "HIGHS", "--time-limit", "2", "--out", "mine.json"]
    runpy.run_path(str(ROOT / "solve.py"), run_name="__main__")


@pytest.mark.slow
def test_processes_that_plan_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All succeed, and what they leave is whole."""
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "cache"))
    in_processes(_plan, tmp_path, processes=4, within_seconds=300.0)
    first, second = (float((tmp_path / f"gradients_{rank}").read_text()) for rank in range(2))
    assert first == pytest.approx(second, rel=1e-4)  # each has measured, and may take other variants
    (kept,) = (tmp_path / "cache").glob("plan_*.json")
    KeptPlan.load(kept)
    ScheduleRecord.load(tmp_path / "mine.json")
    profiles = [*(tmp_path / "cache").glob("profile_*.json")]
    assert len(profiles) == 1  # one store for all
    for path in profiles:
        assert Profile.load(path).costs
    hidden = [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert hidden == []
