"""The zoo: every file keeps its promises; building is reproducible; downloads are checked, resumed and whole."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from test_files import RECORD

import monet_like
from monet_like.cli import main
from monet_like.errors import MonetError, ScheduleFileError, UsageError
from monet_like.models import build_model
from monet_like.roofline import DEVICES
from monet_like.schedule import Schedule
from monet_like.schedule_file import ScheduleRecord
from monet_like.units import GIB
from monet_like.zoo import build as building
from monet_like.zoo import download as downloading
from monet_like.zoo.build import build, described, verify
from monet_like.zoo.catalogue import CATALOGUE, PROFILES, Entry
from monet_like.zoo.download import base_url, cached_path, download, find_file
from monet_like.zoo.registry import Listed, Refused, Registry, zoo_folder
from monet_like.zoo.table import BEGIN, END, markdown, summary, write_into

ROOT = Path(__file__).parents[1]
ZOO = Registry.load(ROOT / "solutions")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["zoo", *arguments], env={"COLUMNS": "200"})


# What is in the repository ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "device"), sorted({(f.model, f.device) for f in ZOO.files}))
def test_every_schedule_fits_its_budget_and_keeps_its_promises(model: str, device: str) -> None:
    files = [f for f in ZOO.files if (f.model, f.device) == (model, device)]
    for listed in files:
        verify(ZOO, listed)  # captures once, simulates each
        assert listed.peak_bytes <= min(listed.budget_bytes, listed.plain_peak_bytes)
        assert listed.gap is None or 0 <= listed.gap < 1


def test_the_registry_names_every_file_once_and_its_source() -> None:
    folder = ROOT / "solutions"
    assert zoo_folder() == folder
    assert {folder / f.path for f in ZOO.files} == set(folder.rglob("solution_*.pkl"))
    assert len({f.full_name for f in ZOO.files}) == len(ZOO.files)
    models = {entry.model for entry in CATALOGUE}
    for listed in ZOO.files:
        assert listed.model in models
        if listed.kind == "roofline":
            assert listed.profile_source == building.roofline_source(listed.profile)
            assert listed.device == DEVICES[listed.profile].device
        else:
            assert listed.captured_there and (folder / listed.profile_source).is_file()
    assert {f.profile for f in ZOO.files if f.kind == "roofline"} <= set(PROFILES)


def test_a_small_batch_runs_by_a_schedule_of_the_zoo() -> None:
    model = build_model("torchvision.models.resnet50()").module
    wrapped = monet_like.ScheduleWrapper(model, "zoo:resnet50_184_10.00", (3, 224, 224))
    assert wrapped.record.inputs[0].shape == (184, 3, 224, 224)
    x = torch.randn(1, 3, 224, 224)
    out = wrapped(x)
    out.square().mean().backward()
    assert torch.allclose(out, model(x), rtol=1e-3, atol=1e-3)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_table_in_the_readme_is_the_registrys() -> None:
    text = (ROOT / "solutions" / "README.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == markdown(ZOO)


# Names --------------------------------------------------------------------------------------------------------


def listed_as(name: str, profile: str, device: str, data: bytes = b"", **changes: Any) -> Listed:
    record = dataclasses.replace(RECORD, **changes)
    return Listed(
        name=name,
        profile=profile,
        kind="roofline" if profile in DEVICES else "measured",
        profile_source=f"roofline:{profile} version 1",
        device=device,
        captured_there=device == "cpu",
        path=f"{profile}/solution_{name}.pkl",
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        bound_seconds=None,
        gap=None,
        bound_kind="none",
        solver="counted",
        solve_seconds=1.5,
        **described(record, 4),
    )


def some_registry(folder: Path) -> Registry:
    files = (
        listed_as("resnet18_4_10.00", "a100", "cuda"),
        listed_as("resnet18_4_10.00", "h100", "cuda"),
        listed_as("resnet18_4_10.00", "cpu", "cpu"),
        listed_as("resnet18_4_10.00", "cpu-2-threads", "cpu"),
        listed_as("vgg16_4_10.00", "h100", "cuda"),
    )
    refused = Refused("vgg16_4_5.00", "h100", 5 * GIB, 9 * GIB, True, int(5.5 * GIB), "no schedule fits", "0" * 64)
    return Registry(folder, files, (refused,))


@pytest.mark.parametrize(
    ("text", "device", "near", "profile"),
    [
        ("zoo:resnet18_4_10.00", "", "", "cpu-2-threads"),  # measured before estimated
        ("resnet18_4_10.00", "cuda", "", "a100"),
        ("zoo:resnet18_4_10.00", "cuda", "h100", "h100"),
        ("zoo:resnet18_4_10.00", "cuda", "h200", "a100"),
        ("zoo:resnet18_4_10.00", "cpu", "", "cpu-2-threads"),
        ("zoo:resnet18_4_10.00@h100", "cpu", "", "h100"),
    ],
)
def test_names(tmp_path: Path, text: str, device: str, near: str, profile: str) -> None:
    assert some_registry(tmp_path).find(text, device=device, near=near).profile == profile


@pytest.mark.parametrize(
    ("text", "device", "expected"),
    [
        ("zoo:resnet18_4_9.00", "", "the zoo has no 'resnet18_4_9.00'; did you mean resnet18_4_10.00, vgg16_4_10.00?"),
        ("zoo:quite else", "", "the zoo has no 'quite else'; monet-like zoo list shows what there is"),
        ("zoo:vgg16_4_10.00@a100", "", "the zoo has vgg16_4_10.00 not for 'a100', but for h100"),
        ("zoo:vgg16_4_5.00", "", "no schedule vgg16_4_5.00 in the zoo: proven not to exist; 5.50 GB would do"),
        (
            "zoo:vgg16_4_10.00",
            "cpu",
            "the zoo has vgg16_4_10.00 for @h100, all captured as on cuda, and the model is on cpu; move the model, or "
            'plan for cpu: monet-like solve "torchvision.models.resnet18(num_classes=10)" 4 10.00 '
            "inplace_conv_multiway_newnode",
        ),
    ],
)
def test_names_that_are_refused(tmp_path: Path, text: str, device: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        some_registry(tmp_path).find(text, device=device)
    assert str(caught.value) == expected


def test_a_registry_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    registry = some_registry(tmp_path)
    registry.save()
    assert Registry.load(tmp_path) == registry


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.update(format="else"), "is not a registry of monet_like's zoo"),
        (lambda c: c.update(version=2), "is a registry of version 2, this package reads 1"),
        (lambda c: c["files"][0].update(path="../up.pkl"), "path '../up.pkl' is not within the folder"),
        (lambda c: c["files"][0].update(path="/etc/x.pkl"), "path '/etc/x.pkl' is not within the folder"),
        (lambda c: c["files"][0].update(sha256="0" * 63), "is none"),
        (lambda c: c["files"][0].update(bytes="5"), "bytes is a str, not int"),
        (lambda c: c["files"][0].update(inputs=[5]), "a list of texts holds a int"),
        (lambda c: c["files"][0].pop("mode"), "is damaged ('mode'"),
    ],
)
def test_a_damaged_registry(tmp_path: Path, change: Callable[[Any], Any], expected: str) -> None:
    some_registry(tmp_path).save()
    path = tmp_path / "registry.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ScheduleFileError) as caught:
        Registry.load(tmp_path)
    assert expected in str(caught.value)


def test_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONET_LIKE_ZOO", str(tmp_path))
    result = command("list")
    assert result.exit_code == 2 and f"there is no zoo in {tmp_path}" in result.output


# Building -----------------------------------------------------------------------------------------------------


@pytest.fixture(name="chain")
def _chain() -> Entry:
    return Entry("chain", f"{ROOT / 'tests' / 'chain.py'}:chain", 16, ("60%", "40%", "0.01"))


def test_a_build_is_reproducible_resumable_and_honest(tmp_path: Path, chain: Entry) -> None:
    told: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"entries": [chain], "profiles": ["a100", "cpu"], "evaluations": 300}
    built = build(tmp_path / "one", **options, progress=lambda *news: told.append(news))
    assert (len(built.made), built.kept, len(built.refused)) == (4, (), 2)
    assert told[0][1:] == (0, 6) and told[-1] == ("done", 6, 6)
    build(tmp_path / "two", **options)
    one, two = Registry.load(tmp_path / "one"), Registry.load(tmp_path / "two")
    assert [f.sha256 for f in one.files] == [f.sha256 for f in two.files]
    assert all(r.proven and r.smallest_bytes is not None for r in one.refused)

    for listed in one.files:
        verify(one, listed)
        assert listed.kind == "roofline" and listed.peak_bytes <= listed.budget_bytes
        assert listed.captured_there == (listed.device == "cpu" or torch.cuda.is_available())
        assert listed.gap is not None and 0 <= listed.gap < 0.5
    again = build(tmp_path / "one", **options)
    assert (again.made, len(again.kept), len(again.refused)) == ((), 4, 2)
    assert Registry.load(tmp_path / "one") == one

    victim = tmp_path / "one" / one.files[0].path
    victim.write_bytes(victim.read_bytes()[:-1])
    assert build(tmp_path / "one", **options).made == (one.files[0].full_name,)
    assert [f.sha256 for f in Registry.load(tmp_path / "one").files] == [f.sha256 for f in one.files]

    now = Registry.load(tmp_path / "one")
    earlier = dataclasses.replace(now.files[0], name="chain_16_earlier", path="earlier.pkl", fingerprint="0" * 64)
    (tmp_path / "one" / earlier.path).touch()
    now.with_file(earlier).save()
    build(tmp_path / "one", **options)
    assert Registry.load(tmp_path / "one") == now and not (tmp_path / "one" / earlier.path).exists()


def test_verify_finds_what_does_not_hold(tmp_path: Path, chain: Entry) -> None:
    build(tmp_path / "zoo", entries=[dataclasses.replace(chain, budgets=("50%",))], profiles=["cpu"], evaluations=100)
    registry = Registry.load(tmp_path / "zoo")
    (listed,) = registry.files
    with pytest.raises(ScheduleFileError, match="differ in what they promise"):
        verify(registry, dataclasses.replace(listed, seconds=listed.seconds / 2), simulated=False)
    path = tmp_path / "zoo" / listed.path
    record = ScheduleRecord.load(path)

    def rewritten(**changes: Any) -> Listed:
        dataclasses.replace(record, **changes).save(path)
        data = path.read_bytes()
        facts = {name: value for name, value in changes.items() if hasattr(listed, name)}
        return dataclasses.replace(listed, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), **facts)

    with pytest.raises(ScheduleFileError, match="bytes, more than its budget"):
        verify(registry, rewritten(budget_bytes=record.peak_bytes - 1))
    with pytest.raises(ScheduleFileError, match="the registry says"):
        verify(registry, rewritten(seconds=record.seconds * 0.9))
    with pytest.raises(ScheduleFileError, match="was made for another program"):
        verify(registry, rewritten(fingerprint="0" * 64))
    verify(registry, rewritten())


def test_a_replayed_schedule_of_a_build(tmp_path: Path, chain: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "zoo", entries=[dataclasses.replace(chain, budgets=("50%",))], profiles=["a100", "cpu"], evaluations=100)  # fmt: skip
    monkeypatch.setenv("MONET_LIKE_ZOO", str(tmp_path / "zoo"))
    name = Registry.load(tmp_path / "zoo").files[0].name
    model = build_model(chain.model).module
    wrapped = monet_like.ScheduleWrapper(model, f"zoo:{name}", (3, 256, 256))
    assert wrapped.record.device == "roofline:cpu"
    x = torch.randn(1, 3, 256, 256)
    assert torch.allclose(wrapped(x), model(x), atol=1e-5)
    with (
        pytest.warns(UserWarning, match=r"planned for a100 \(datasheet rates\)"),
        pytest.raises(ScheduleFileError, match="for roofline:a100"),  # the programs differ: refused, not run
    ):
        monet_like.ScheduleWrapper(model, f"zoo:{name}@a100", (3, 256, 256))


def test_unknown_profiles_and_models() -> None:
    result = command("build", "--profiles", "a1000")
    assert result.exit_code == 2 and "there is no profile 'a1000'; choose some of cpu, p100, a100" in result.output
    result = command("build", "resnet5")
    assert (
        result.exit_code == 2 and "the catalogue has no 'resnet5'; choose some of resnet50, googlenet" in result.output
    )


# Downloading --------------------------------------------------------------------------------------------------

BIG = dataclasses.replace(RECORD, schedule=Schedule(tuple(range(40_000)), RECORD.schedule.again, RECORD.schedule.ways))


class Server:
    """A real one. ``files``: what it has; ``cuts``: bytes after which the next answers' connections are cut."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.ranges = True
        self.asked: list[str] = []
        self.sent = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/zoo"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        data = self.files.get(handler.path.removeprefix("/zoo/"))
        asked = handler.headers.get("Range", "")
        self.asked.append(asked)
        if self.statuses or data is None:
            handler.send_error(self.statuses.pop(0) if self.statuses else 404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        if start >= len(data):
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        part = data[start:]
        cut = self.cuts.pop(0) if self.cuts else len(part)
        handler.wfile.write(part[:cut])
        self.sent += len(part[:cut])
        handler.close_connection = True


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(downloading, "PAUSE", 0.001)
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(name="listed")
def _listed_file(server: Server, tmp_path: Path) -> Listed:
    path = tmp_path / "big.pkl"
    BIG.save(path)
    listed = listed_as("resnet18_4_10.00", "a100", "cuda", path.read_bytes())
    server.files[listed.path] = path.read_bytes()
    return listed


def nothing_kept(listed: Listed) -> bool:
    return not list(cached_path(listed).parent.iterdir())


def test_a_good_file_is_fetched_once(server: Server, listed: Listed) -> None:
    progress: list[tuple[int, int]] = []
    path = download(listed, server.url, lambda *news: progress.append(news))
    assert path == cached_path(listed) and ScheduleRecord.load(path) == BIG
    assert progress[-1] == (listed.bytes, listed.bytes) and len(progress) > 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert download(listed, server.url) == path and len(server.asked) == 1


def test_a_file_with_another_hash_is_not_kept(server: Server, listed: Listed) -> None:
    server.files[listed.path] = bytes(listed.bytes)
    with pytest.raises(ScheduleFileError, match="is not the file that the registry names"):
        download(listed, server.url)
    assert nothing_kept(listed)


def test_a_changed_file_in_the_cache_is_fetched_again(server: Server, listed: Listed) -> None:
    path = download(listed, server.url)
    path.write_bytes(b"else")
    assert ScheduleRecord.load(download(listed, server.url)) == BIG


def test_a_truncated_file_is_told_and_not_used(server: Server, listed: Listed) -> None:
    whole = server.files[listed.path]
    server.files[listed.path] = whole[:1000]
    with pytest.raises(ScheduleFileError, match=rf"broke off after \d+ of {listed.bytes} bytes .*run again"):
        download(listed, server.url)
    assert not cached_path(listed).exists()
    server.files[listed.path] = whole
    assert ScheduleRecord.load(download(listed, server.url)) == BIG


def test_a_file_that_is_too_large(server: Server, listed: Listed) -> None:
    server.files[listed.path] += b"more"
    with pytest.raises(ScheduleFileError, match=f"is larger than the {listed.bytes} bytes"):
        download(listed, server.url)
    assert not cached_path(listed).exists()


def test_a_file_that_is_not_there(server: Server, listed: Listed) -> None:
    server.files.clear()
    with pytest.raises(ScheduleFileError, match="cannot be got: status 404 Not Found"):
        download(listed, server.url)
    assert len(server.asked) == 1 and not cached_path(listed).exists()


def test_a_server_that_dies_half_way_is_asked_for_the_rest(server: Server, listed: Listed) -> None:
    half = 50 * 1024
    server.cuts = [half]
    assert ScheduleRecord.load(download(listed, server.url)) == BIG
    assert server.asked == ["", f"bytes={half}-"] and server.sent == listed.bytes


def test_a_later_run_goes_on_where_an_earlier_one_stopped(server: Server, listed: Listed) -> None:
    server.cuts = [2048, 0, 0, 0]
    with pytest.raises(ScheduleFileError, match=f"broke off after 2048 of {listed.bytes} bytes"):
        download(listed, server.url)
    asked = len(server.asked)
    assert asked == downloading.ATTEMPTS
    assert ScheduleRecord.load(download(listed, server.url)) == BIG
    assert server.asked[asked:] == ["bytes=2048-"] and server.sent == listed.bytes


def test_a_server_without_ranges_sends_it_all_again(server: Server, listed: Listed) -> None:
    server.ranges, server.cuts, server.statuses = False, [2048], [503]
    assert ScheduleRecord.load(download(listed, server.url)) == BIG
    assert server.asked == ["", "", "bytes=2048-"] and server.sent == listed.bytes + 2048


def test_no_server(listed: Listed, server: Server) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(ScheduleFileError, match=r"broke off after 0 of .*ConnectionError"):
        download(listed, server.url)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(downloading.cache_folder() / "ran"),)


def test_a_hostile_file_runs_nothing_even_with_the_right_hash(server: Server) -> None:
    data = pickle.dumps({"format": Hostile()})
    listed = listed_as("resnet18_4_10.00", "a100", "cuda", data)
    server.files[listed.path] = data
    with pytest.raises(ScheduleFileError, match="is refused: a schedule holds plain data only"):
        download(listed, server.url)
    assert not (downloading.cache_folder() / "ran").exists()


@pytest.mark.parametrize("url", ["file:///etc", "ftp://x/y", "zoo"])
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not an address to download from"):
        base_url(url)


def test_the_address_and_the_folder_are_configurable(
    server: Server, listed: Listed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Registry(tmp_path / "zoo", (listed,)).save()
    monkeypatch.setenv("MONET_LIKE_ZOO", str(tmp_path / "zoo"))
    with pytest.raises(UsageError, match="there is no address to download from; give --base-url, or set MONET_LIKE_Z"):
        find_file(listed.name)
    result = command("download", listed.name, "--base-url", server.url)
    assert result.exit_code == 0 and result.output.strip() == str(cached_path(listed))
    cached_path(listed).unlink()
    monkeypatch.setenv("MONET_LIKE_ZOO_URL", server.url + "/")
    assert find_file(f"zoo:{listed.full_name}") == cached_path(listed)
    monkeypatch.delenv("MONET_LIKE_ZOO_URL")
    assert find_file(listed.name) == cached_path(listed)  # cached
    assert len(server.asked) == 2
    shown = command("show", listed.name)
    assert shown.exit_code == 0 and "captured as on cuda, without one" in shown.output and listed.sha256 in shown.output
    here = tmp_path / "zoo" / listed.path
    here.parent.mkdir()
    here.write_bytes(server.files[listed.path])
    assert find_file(listed.name) == here  # the folder comes first
    here.write_bytes(b"else")
    with pytest.raises(ScheduleFileError, match="is not the file that the registry names"):
        find_file(listed.name)


# Commands -----------------------------------------------------------------------------------------------------


def test_list_show_and_verify() -> None:
    listed = ZOO.files[0]
    result = command("list", "--profile", listed.profile)
    assert result.exit_code == 0 and listed.name in result.output
    content = json.loads(command("list", "--json").output)
    assert len(content["files"]) == len(ZOO.files)
    assert json.loads(command("show", listed.full_name, "--json").output)["sha256"] == listed.sha256
    result = command("verify", "--no-simulate")
    assert result.exit_code == 0 and f"{len(ZOO.files)} schedules: hashes and contents" in result.output


def test_a_measured_schedule_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (listed,) = (f for f in ZOO.files if f.kind == "measured")
    for name in (listed.path, listed.profile_source):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / "solutions" / name).read_bytes())
    monkeypatch.setenv("MONET_LIKE_ZOO", str(tmp_path))
    files = (str(tmp_path / listed.path), str(tmp_path / listed.profile_source))
    result = command("add", "resnet50", listed.profile, *files)
    assert result.exit_code == 0, result.output
    assert Registry.load(tmp_path).files == (listed,)
    result = command("add", "resnet50", "h100", *files)
    assert result.exit_code == 2 and "the machine's name 'h100' must be of a-z" in result.output
    result = command("add", "resnet50", listed.profile, str(ROOT / "solutions" / listed.path), files[1])
    assert result.exit_code == 2 and "must be in the zoo's folder" in result.output


def test_tables(tmp_path: Path) -> None:
    registry = some_registry(tmp_path)
    text = markdown(registry)
    assert "### resnet18, batch 4" in text and "plain PyTorch takes 16.00 GB" in text
    assert "| resnet18_4_10.00 | cpu-2-threads (measured) | 8.00 GB | 1.25 s | +25.0 % | none proven | 1.5 s |" in text
    assert "| vgg16_4_5.00 | h100 | proven infeasible; 5.50 GB will do |" in text
    assert "| vgg16, batch 4 | 16.00 GB | 8.00 GB | +25.0 % | 1 |" in summary(registry, "h100")
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(path, text)
    assert path.read_text() == f"before\n{BEGIN}\n\n{text}\n\n{END}\nafter\n"
    path.write_text("nothing")
    with pytest.raises(MonetError, match="needs the lines"):
        write_into(path, text)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(MonetError, match=r"README.md is not text; give a Markdown file"):
        write_into(path, text)


def test_a_local_search_takes_no_less_than_nothing() -> None:
    result = command("build", "resnet50", "--evaluations", "-1")
    assert result.exit_code == 2 and "-1 is not in the range 0<=x<=" in result.output
