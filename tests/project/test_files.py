"""Files: written whole or not at all; read without running anything, whatever is in them."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import stat
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from records import RECORD

from monet_like import files
from monet_like.errors import ScheduleFileError, UsageError
from monet_like.files import check_writable, read_bytes, read_text, write_atomically
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import Cost
from monet_like.ir.schedule import Schedule
from monet_like.ir.schedule_file import InputSpec, ScheduleRecord

PROFILE = Profile(
    "cpu: a processor, 2 threads",
    {"aten.relu float32[4, 8]": Cost(1.5e-6, 0), "aten.mm": Cost(0.1 + 0.2, 2**40)},
    "measured at batch 4",
    {"torch": "2.15.0"},
)


#: Of a profile that cannot be read.
AGAIN = "give another, or, if it was one, delete it to measure again"


def saved(record: ScheduleRecord | Profile, path: Path) -> bytes:
    """The bytes of a record's file."""
    record.save(path)
    return path.read_bytes()


def changed(path: Path, change: Callable[[dict[str, Any]], Any], record: ScheduleRecord | Profile = RECORD) -> Path:
    """A record's file, whose content went through ``change``."""
    content = json.loads(saved(record, path))
    change(content)
    path.write_text(json.dumps(content))
    return path


def refusal(path: Path, kind: type[ScheduleRecord] | type[Profile] = ScheduleRecord) -> str:
    """The message with which a file is refused."""
    with pytest.raises(ScheduleFileError) as caught:
        kind.load(path)
    return str(caught.value)


# Writing ------------------------------------------------------------------------------------------------------


def test_a_write_makes_folders_and_leaves_only_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.json"
    write_atomically(path, b"first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["file.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, hard))  # the kernel stops the write in its middle
    try:
        with pytest.raises(UsageError, match=r"cannot write .*file\.json: File too large"):
            write_atomically(path, bytes(8 * 2**20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.json"]


@pytest.mark.parametrize("where", ["fsync", "chmod", "replace"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "file.json"
    RECORD.save(path)

    def interrupt(*_: Any) -> None:
        assert len(os.listdir(tmp_path)) == 2  # the temporary file is there at this moment
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            replace(RECORD, model="another").save(path)
    assert ScheduleRecord.load(path) == RECORD
    assert os.listdir(tmp_path) == ["file.json"]


def test_readers_see_the_old_or_the_new_file(tmp_path: Path) -> None:
    path, contents, seen = tmp_path / "file.json", (b"a" * 100_000, b"b" * 50_000), set()
    write_atomically(path, contents[0])
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(40):
        write_atomically(path, contents[index % 2])
    done.set()
    reader.join()
    assert seen <= set(contents)
    assert seen


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "file.json")
    assert os.listdir(tmp_path) == ["new"]
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file/x.json", "Not a directory"),
        ("file/deeper/x.json", "Not a directory"),
        ("folder", "it is a directory; give the name of a file"),
        ("n" * 300, "File name too long"),
        ("n" * 250, "File name too long"),  # fits itself, its temporary name does not
    ],
)
@pytest.mark.parametrize("write", [check_writable, lambda path: write_atomically(path, b"x")], ids=["check", "write"])
def test_places_that_cannot_be_written(tmp_path: Path, name: str, reason: str, write: Callable[[Path], None]) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        write(tmp_path / name)
    assert str(caught.value).startswith(f"cannot write {tmp_path / name}: {reason}")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScheduleFileError) as caught:
        read_bytes(tmp_path / "no.json", "schedule")
    assert str(caught.value) == (
        f"there is no schedule file {tmp_path / 'no.json'}; make one with solve.py, or give another"
    )
    with pytest.raises(ScheduleFileError) as caught:
        read_bytes(tmp_path, "schedule")
    assert str(caught.value) == f"cannot read {tmp_path}: Is a directory"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleFileError) as caught:
        read_text(tmp_path / "binary", "profile")
    assert str(caught.value) == f"{tmp_path / 'binary'} is not a profile: it is not text"


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(files.LARGEST_BYTES + 1)  # sparse
    assert "is too large to be a schedule (268435457 bytes)" in refusal(tmp_path / "huge.json")


# Damaged schedules --------------------------------------------------------------------------------------------


def test_every_truncation(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    data = saved(RECORD, path)
    for length in range(len(data) - 2):  # to the closing brace
        path.write_bytes(data[:length])
        assert refusal(path).startswith(f"{path} is not a schedule file, or is damaged (no JSON: ")


def test_flipped_bits_are_refused_or_harmless(tmp_path: Path) -> None:
    path, generator, refused = tmp_path / "file.json", random.Random(7), 0
    data = saved(RECORD, path)
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 8))):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            found = ScheduleRecord.load(path)
        except ScheduleFileError:
            refused += 1
        else:
            assert all(type(i) is int and i >= 0 for tasks in found.schedule.again for i in tasks)
    assert refused > 150


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"{}", "is not a schedule file of monet_like; make one with solve.py"),
        (b"[]", "is not a schedule file of monet_like; make one with solve.py"),
        (b'{"format": ["monet_like schedule"]}', "is not a schedule file of monet_like; make one with solve.py"),
        (b'{"format": 1}', "is not a schedule file of monet_like; make one with solve.py"),
        (b'{"format": "monet_like schedule", "version": 3}', "was made by an earlier version of monet_like"),
        (b'{"format": "monet_like schedule", "version": 4}', "is damaged: it has no field 'forward'"),
        *(
            (data, "is not a schedule file, or is damaged (no JSON: ")
            for data in (
                *(b"", b"# text", b"\x00" * 100, b"{", b'{"a": ' + b"[" * 10**5, b'{"a": "\xff"}'),
                b'{"a": ' + b"9" * 5000 + b"}",
                pickle.dumps({"format": "monet_like schedule"}),
            )
        ),
    ],
)
def test_what_is_no_schedule(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(data)
    assert refusal(path).startswith(f"{path} {expected}")


@pytest.mark.parametrize(
    ("version", "shown"),
    [(5, "5"), (3, "3"), (True, "of type bool"), (2.0, "of type float"), (None, "of type NoneType")],
)
def test_another_version(tmp_path: Path, version: Any, shown: str) -> None:
    path = changed(tmp_path / "file.json", lambda content: content.update(version=version))
    assert refusal(path) == (
        f"{path} was made by {'an earlier' if version == 3 else 'another'} version of "
        f"monet_like: it has format version {shown}, this one reads 4; solve again"
    )


OPTIONAL = {
    "schedule",
    "made_last",
    "cublas_bytes",
    "optimizer_in_backward",
    "attention",
    "run_bytes",
    "offloaded",
    "device_seconds",
}  # the first is three; without the others files are from before
FIELDS = ("forward", "again", "ways", "inputs", *(f.name for f in fields(ScheduleRecord) if f.name not in OPTIONAL))


@pytest.mark.parametrize("name", sorted(set(FIELDS)))
def test_a_missing_field(tmp_path: Path, name: str) -> None:
    path = changed(tmp_path / "file.json", lambda content: content.pop(name))
    assert refusal(path) == f"{path} is damaged: it has no field {name!r}; solve again"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forward", None),
        ("forward", [0, 1.0]),
        ("forward", [0, True]),
        ("forward", [0, -1]),
        ("again", {}),
        ("again", [[0], ["1"]]),
        ("inputs", ["shape"]),
        ("inputs", [{"shape": [4, True], "dtype": "float32", "requires_grad": False}]),
        ("inputs", [{"shape": [-4], "dtype": "float32", "requires_grad": False}]),
        ("inputs", [{"shape": [2**70], "dtype": "float32", "requires_grad": False, "layout": ""}]),
        ("inputs", [{"shape": [2**30, 0, 2**30], "dtype": "float32", "requires_grad": False, "layout": ""}]),
        ("inputs", [{"shape": [4], "dtype": "float32"}]),
        ("model", 18),
        ("budget_bytes", 1e10),
        ("cublas_bytes", -1),
        ("run_bytes", [1.5]),
        ("device_seconds", "1"),
        ("seconds", True),
        ("gap", "1"),
        ("ablation", 1),
        ("versions", {"torch": 2}),
        ("counts", {"kept": True}),
    ],
)
def test_a_field_of_the_wrong_type(tmp_path: Path, name: str, value: Any) -> None:
    path = changed(tmp_path / "file.json", lambda content: content.update({name: value}))
    message = refusal(path)
    assert message.startswith(f"{path} is damaged: ")
    assert message.endswith("; solve again")


# Round trips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, bound_seconds=None, gap=None),
        replace(RECORD, bound_seconds=-1.5e300, gap=5e-324, seconds=2),
        replace(RECORD, schedule=Schedule((), (), ()), inputs=(), counts={}, versions={}, model="", note="ünïcode ✓"),
        replace(RECORD, schedule=Schedule(tuple(range(3000)), ((1,),) * 3000, (2**70,) * 3000)),
    ],
)
def test_a_schedule_comes_back_as_it_was(tmp_path: Path, record: ScheduleRecord) -> None:
    record.save(tmp_path / "file.json")
    found = ScheduleRecord.load(tmp_path / "file.json")
    assert found == record
    assert found is not record
    hash(found.schedule)  # tuples all the way down, not the lists of the file


def test_what_is_saved_can_be_read(tmp_path: Path) -> None:
    """PyTorch's version is a class of its own, and solvers give numpy's numbers."""
    strange: dict[str, Any] = {
        "versions": {"torch": torch.__version__},
        "bound_seconds": np.float64(1.5),
        "seconds": np.float32(2.5),
        "peak_bytes": np.int64(7),
        "inputs": (InputSpec(torch.Size([4, 3]), "float32"),),
    }
    assert type(torch.__version__) is not str
    replace(RECORD, **strange).save(tmp_path / "file.json")
    found = ScheduleRecord.load(tmp_path / "file.json")
    assert found == replace(RECORD, **strange)
    assert [type(v) for v in (found.versions["torch"], found.bound_seconds, found.peak_bytes)] == [str, float, int]


def test_what_is_not_plain_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    RECORD.save(path)
    with pytest.raises(TypeError, match="complex is not plain data"):
        replace(RECORD, seconds=1j).save(path)  # type: ignore[arg-type]
    assert ScheduleRecord.load(path) == RECORD


def test_every_field_is_told_apart(tmp_path: Path) -> None:
    """The round trip compares every field: a record in which it has its default differs from RECORD."""
    for field in fields(ScheduleRecord):
        value = getattr(RECORD, field.name)
        empty: Any = (
            not value
            if isinstance(value, bool)
            else type(value)()
            if field.name != "schedule"
            else Schedule((), (), ())
        )
        other = replace(RECORD, **{field.name: empty})
        assert other != RECORD, field.name
        other.save(tmp_path / "file.json")
        assert ScheduleRecord.load(tmp_path / "file.json") == other


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    dated = replace(PROFILE, days={"aten.mm": "2026-11-25"})
    for profile in (PROFILE, dated, replace(dated, scaled=frozenset(PROFILE.costs)), Profile("roofline: h100", {})):
        profile.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json") == profile


def test_a_profile_of_the_first_version_is_read(tmp_path: Path) -> None:
    """Its costs are pairs, and nothing says when they were measured."""
    path = changed(tmp_path / "profile.json", lambda content: content.update(version=1), PROFILE)
    assert Profile.load(path) == PROFILE and Profile.load(path).measured_on(PROFILE.costs) == ""


# Damaged profiles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "hello", "[" * 100_000, '{"format": "monet_like profile"', "\x00"])
def test_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    message = refusal(tmp_path / "profile.json", Profile)
    assert "is not a profile (no JSON: " in message and message.endswith(AGAIN)


@pytest.mark.parametrize("text", ["{}", "[]", "3", "null", '"monet_like profile"', '{"format": "other"}'])
def test_another_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    message = refusal(tmp_path / "profile.json", Profile)
    assert message.endswith(f"is not a profile of monet_like; {AGAIN}")


@pytest.mark.parametrize("version", [3, 0, True, "1", None, 1.0])
def test_another_profile_version(tmp_path: Path, version: Any) -> None:
    path = changed(tmp_path / "profile.json", lambda content: content.update(version=version), PROFILE)
    assert refusal(path, Profile) == (
        f"{path} is a profile of format version {version}, this package reads 1 and 2; {AGAIN}"
    )


@pytest.mark.parametrize("name", ["device", "costs", "note", "versions"])
def test_a_profile_without_a_field(tmp_path: Path, name: str) -> None:
    path = changed(tmp_path / "profile.json", lambda content: content.pop(name), PROFILE)
    assert re.search(f"is damaged .*{name}.*; {AGAIN}", refusal(path, Profile))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("costs", None),
        ("scaled", ["no operator"]),
        ("scaled", {}),
        ("costs", {"a": [1.0]}),
        ("costs", {"a": [1.0, 2, 3]}),
        ("costs", {"a": [1.0, 2, "yesterday"]}),
        ("costs", {"a": [1.0, 2, "2026-11-25", 4]}),
        ("costs", {"a": [1.0, 2.5]}),
        ("costs", {"a": [True, 1]}),
        ("costs", {"a": [None, 1]}),
        ("costs", {"a": [-1.0, 1]}),
        ("costs", {"a": [1.0, -1]}),
        ("costs", {"a": [float("nan"), 1]}),
        ("device", 3),
        ("versions", {"torch": 2}),
    ],
)
def test_a_profile_with_a_wrong_field(tmp_path: Path, name: str, value: Any) -> None:
    path = changed(tmp_path / "profile.json", lambda content: content.update({name: value}), PROFILE)
    assert re.search(f"is damaged .*; {AGAIN}", refusal(path, Profile))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("gap", float("nan"), "got nan - at `..gap`"),
        ("bound_seconds", float("-inf"), "got -inf - at `..bound_seconds`"),
        ("peak_bytes", 10**400, "more than 300 digits"),
        ("model", "net\x1b[2J", "cannot be printed"),
        ("note", "\ud800", "cannot be printed"),
    ],
)
def test_numbers_and_texts_that_nobody_could_show_are_refused(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    path = changed(tmp_path / "file.json", lambda content: content.update({field: value}))
    assert re.search(f"is damaged: .*{said}", refusal(path))


def test_what_has_no_end_is_not_read() -> None:
    assert refusal(Path("/dev/zero")) == "/dev/zero is no regular file; give the name of a schedule file"
