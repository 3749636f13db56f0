"""The zoo: every file keeps its promises; building is reproducible; downloads are checked and whole."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from processes import fork_server
from records import RECORD
from torch import nn

import monet_like
from monet_like.cli.group import main
from monet_like.cli.zoo import build as building
from monet_like.cli.zoo import problems
from monet_like.cli.zoo.build import build, described, verify
from monet_like.cli.zoo.table import BEGIN, END, markdown, summary, write_into
from monet_like.errors import MonetError, ScheduleFileError, UsageError
from monet_like.ir.schedule import Schedule
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.units import GIB
from monet_like.models import build_model
from monet_like.profile.devices import DEVICES
from monet_like.zoo import download as downloading
from monet_like.zoo import model_file
from monet_like.zoo.catalogue import CATALOGUE, PROFILES, Entry
from monet_like.zoo.download import base_url, cached_path, download, find_record
from monet_like.zoo.registry import Registry, zoo_folder
from monet_like.zoo.rows import Listed, Refused, ZooFile

ROOT = Path(__file__).parents[2]
ZOO = Registry.load(ROOT / "solutions")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["zoo", *arguments], env={"COLUMNS": "200"})


# What is in the repository ------------------------------------------------------------------------------------


#: One model of each kind, since a capture takes up to half a minute; ``monet-like zoo verify`` takes all eleven.
CAPTURED = ("resnet50()", "mobilenet_v2()", "vgg16()", "vit_b_16()", "unet", "nnunet_large()", "llama_1b()")


def test_every_file_is_whole_and_promises_what_the_registry_says() -> None:
    for listed in ZOO.schedules:
        verify(ZOO, listed, simulated=False)
        assert listed.peak_bytes <= min(listed.budget_bytes, listed.plain_peak_bytes)
        assert listed.gap is None or 0 <= listed.gap < 1


@pytest.mark.slow(but=["unet"], rare=2)
@pytest.mark.parametrize("model", sorted({f.model for f in ZOO.schedules if f.model.endswith(CAPTURED)}))
def test_schedules_for_gpus_fit_their_budget_and_keep_their_promises(model: str) -> None:
    for listed in ZOO.schedules:
        if (listed.model, listed.device) == (model, "cuda"):
            verify(ZOO, listed)  # captures once, simulates each


def test_the_registry_names_every_file_once_and_its_source() -> None:
    folder = ROOT / "solutions"
    assert zoo_folder() == folder
    assert {folder / f.path for f in ZOO.files} == {*folder.glob("*.json")} - {folder / "registry.json"}
    assert {f.path for f in ZOO.files} == {listed.path for listed in ZOO.schedules}
    assert len(ZOO.files) <= len(CATALOGUE) + sum(listed.kind == "measured" for listed in ZOO.schedules)
    assert len({f.full_name for f in ZOO.schedules}) == len(ZOO.schedules)
    models = {entry.model for entry in CATALOGUE}
    for listed in ZOO.schedules:
        assert listed.model in models
        if listed.kind == "roofline":
            assert listed.profile_source == building.roofline_source(listed.profile)
            assert listed.device == DEVICES[listed.profile].device
        else:
            assert listed.captured_there and (folder / listed.profile_source).is_file()
    assert {f.profile for f in ZOO.schedules if f.kind == "roofline"} <= set(PROFILES)


@pytest.mark.slow
def test_the_schedule_for_a_cpu_keeps_its_promises_and_runs_a_small_batch() -> None:
    (listed,) = (f for f in ZOO.schedules if f.device == "cpu")
    verify(ZOO, listed)
    model = build_model(listed.model).module
    _, captured = problems.captured_model(listed.model, listed.batch, "cpu")
    wrapped = monet_like.ScheduleWrapper(model, f"zoo:{listed.name}", (3, 224, 224), captured=captured)
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


def listed_as(name: str, profile: str, device: str, path: str = "", **changes: Any) -> Listed:
    record = dataclasses.replace(RECORD, **changes)
    return Listed(
        name=name,
        profile=profile,
        kind="roofline" if profile in DEVICES else "measured",
        profile_source=f"roofline:{profile} version 1",
        device=device,
        captured_there=device == "cpu",
        path=path or f"{name.rpartition('_')[0]}.json",
        bound_seconds=None,
        gap=None,
        bound_kind="none",
        solver="counted",
        solve_seconds=1.5,
        **described(record, 4),
    )


def some_registry(folder: Path) -> Registry:
    schedules = (
        listed_as("resnet18_4_10.00", "a100", "cuda"),
        listed_as("resnet18_4_10.00", "h100", "cuda"),
        listed_as("resnet18_4_10.00", "cpu", "cpu"),
        listed_as("resnet18_4_10.00", "cpu-2-threads", "cpu", "measured.json"),
        listed_as("vgg16_4_10.00", "h100", "cuda"),
    )
    files = tuple(ZooFile(path, "0" * 64, 5) for path in ("measured.json", "resnet18_4.json", "vgg16_4.json"))
    refused = Refused("vgg16_4_5.00", "h100", 5 * GIB, 9 * GIB, True, int(5.5 * GIB), "no schedule fits", "0" * 64)
    return Registry(folder, schedules, (refused,), files)


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


def damage(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_registry_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    registry = some_registry(tmp_path)
    registry.save()
    assert Registry.load(tmp_path) == registry


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.update(format="else"), "is not a zoo registry of monet_like"),
        (lambda c: c.update(version=1), "is a zoo registry of format version 1, this package reads 2"),
        (lambda c: c["files"][0].update(path="../up.json"), "path '../up.json' is not within the folder"),
        (lambda c: c["files"][0].update(path="/etc/x.json"), "path '/etc/x.json' is not within the folder"),
        (lambda c: c["files"][0].update(sha256="0" * 63), "is none"),
        (lambda c: c["files"].pop(0), "it names no file 'measured.json'"),
        (lambda c: c["schedules"][0].update(inputs=[5]), "Expected `str`, got `int` - at `$.schedules[0].inputs[0]`"),
        (lambda c: c["schedules"][0].pop("mode"), "required field `mode` - at `$.schedules[0]`"),
    ],
)
def test_a_damaged_registry(tmp_path: Path, change: Callable[[Any], Any], expected: str) -> None:
    some_registry(tmp_path).save()
    damage(tmp_path / "registry.json", change)
    with pytest.raises(ScheduleFileError, match=re.escape(expected)):
        Registry.load(tmp_path)


def test_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONET_LIKE_ZOO", str(tmp_path))
    result = command("list")
    assert result.exit_code == 2 and f"there is no zoo in {tmp_path}" in result.output


# Building -----------------------------------------------------------------------------------------------------


@pytest.fixture(name="chain")
def _chain() -> Entry:
    return Entry("chain", f"{ROOT / 'tests' / 'helpers' / 'chain.py'}:chain", 16, ("60%", "40%", "0.01"))


def went_on_as(folder: Path, options: dict[str, Any]) -> None:
    """Build ``two``, stopped after two plans and then by two processes; it is what ``one`` is."""

    def stop(what: str, done: int, _: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder / "two", **options, progress=stop)
    assert len(Registry.load(folder / "two").rows) == 2
    built = build(folder / "two", **options, processes=2)
    assert (len(built.made) + len(built.refused), len(built.kept)) == (5, 1) or len(built.kept) == 2
    assert (folder / "two" / "chain_16.json").read_bytes() == (folder / "one" / "chain_16.json").read_bytes()
    one, two = Registry.load(folder / "one"), Registry.load(folder / "two")
    assert [s.full_name for s in one.rows] == [s.full_name for s in two.rows] and one.files == two.files


@pytest.mark.slow
def test_a_build_is_reproducible_resumable_and_honest(
    tmp_path: Path, chain: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on where it was stopped, with several processes, to the same files."""
    monkeypatch.setattr(building, "get_context", fork_server)
    told: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"entries": [chain], "profiles": ["a100", "cpu"], "evaluations": 300}
    built = build(tmp_path / "one", **options, progress=lambda *news: told.append(news))
    went_on_as(tmp_path, options)
    assert (len(built.made), built.kept, len(built.refused)) == (4, (), 2)
    assert told[0] == ("chain 16: 6 to plan", 0, 6) and told[-1] == ("done", 6, 6)
    one = Registry.load(tmp_path / "one")
    assert [f.path for f in one.files] == ["chain_16.json"] and len(one.schedules) == 4
    assert all(r.proven and r.smallest_bytes is not None for r in one.refused)

    for listed in one.schedules:
        verify(one, listed)
        assert listed.kind == "roofline" and listed.peak_bytes <= listed.budget_bytes
        assert listed.captured_there == (listed.device == "cpu" or torch.cuda.is_available())
        assert listed.gap is not None and 0 <= listed.gap < 0.6
    again = build(tmp_path / "one", **options)
    assert (again.made, len(again.kept), len(again.refused)) == ((), 4, 2)
    assert Registry.load(tmp_path / "one") == one

    file = tmp_path / "one" / "chain_16.json"
    good = file.read_bytes()
    file.write_bytes(good[:-1])  # all of it is made anew
    assert sorted(build(tmp_path / "one", **options).made) == sorted(listed.full_name for listed in one.schedules)
    assert file.read_bytes() == good and Registry.load(tmp_path / "one").files == one.files

    now = Registry.load(tmp_path / "one")
    record = now.record(now.schedules[0])
    earlier = dataclasses.replace(now.schedules[0], name="chain_16_earlier", fingerprint="0" * 64)
    now.with_schedule(earlier, record).save()
    assert b"chain_16_earlier" in file.read_bytes()
    build(tmp_path / "one", **options)
    assert Registry.load(tmp_path / "one") == now and file.read_bytes() == good


def test_large_weights_are_not_filled() -> None:
    """Those of linear layers and convolutions, embeddings and attention: no random numbers are drawn for them."""
    state = torch.get_rng_state()
    with problems.Unfilled():
        layers = [nn.Linear(512, 256, bias=False), nn.Conv2d(64, 256, 3, bias=False), nn.Embedding(512, 256)]
        layers.append(nn.MultiheadAttention(512, 4, bias=False))
    assert torch.equal(torch.get_rng_state(), state)
    with problems.Unfilled():
        small = nn.Linear(8, 8)
    assert small.weight.detach().abs().max() <= 8**-0.5  # as PyTorch fills it


def test_verify_finds_what_does_not_hold(tmp_path: Path, chain: Entry) -> None:
    build(tmp_path / "zoo", entries=[dataclasses.replace(chain, budgets=("50%",))], profiles=["cpu"], evaluations=100)
    registry = Registry.load(tmp_path / "zoo")
    (listed,) = registry.schedules
    with pytest.raises(ScheduleFileError, match="differ in what they promise"):
        verify(registry, dataclasses.replace(listed, seconds=listed.seconds / 2), simulated=False)
    record = registry.record(listed)

    def check(**changes: Any) -> None:
        facts = {name: value for name, value in changes.items() if hasattr(listed, name)}
        row = dataclasses.replace(listed, **facts)
        verify(registry.with_schedule(row, dataclasses.replace(record, **changes)), row)

    with pytest.raises(ScheduleFileError, match="bytes, more than its budget"):
        check(budget_bytes=record.peak_bytes - 1)
    with pytest.raises(ScheduleFileError, match="the registry says"):
        check(seconds=record.seconds * 0.9)
    with pytest.raises(ScheduleFileError, match="was made for another program"):
        check(fingerprint="0" * 64)
    check()


@pytest.mark.slow
def test_a_replayed_schedule_of_a_build(tmp_path: Path, chain: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    build(
        tmp_path / "zoo",
        entries=[dataclasses.replace(chain, budgets=("0.41",))],
        profiles=["a100", "cpu"],
        evaluations=100,
    )
    monkeypatch.setenv("MONET_LIKE_ZOO", str(tmp_path / "zoo"))
    name = Registry.load(tmp_path / "zoo").schedules[0].name
    model = build_model(chain.model).module
    wrapped = monet_like.ScheduleWrapper(model, f"zoo:{name}", (3, 256, 256))
    assert wrapped.record.device == "roofline:cpu"
    x = torch.randn(1, 3, 256, 256)
    assert torch.allclose(wrapped(x), model(x), atol=1e-5)
    with (
        pytest.warns(UserWarning, match=r"planned for a100 \(datasheet rates\)"),
        pytest.raises(ScheduleFileError, match="planned for a100"),  # the programs differ: refused, not run
    ):
        monet_like.ScheduleWrapper(model, f"zoo:{name}@a100", (3, 256, 256))


# Files of a model ---------------------------------------------------------------------------------------------


def test_a_file_of_a_model_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    other = dataclasses.replace(RECORD, budget_bytes=5 * GIB, seconds=0.1 + 0.2)
    path = tmp_path / "resnet18_4.json"
    model_file.save(path, {"a@x": RECORD, "b@x": other})
    assert model_file.load(path) == {"a@x": RECORD, "b@x": other}
    content = json.loads(path.read_text())
    assert "fingerprint" in content["shared"] and "fingerprint" not in content["schedules"]["a@x"]
    assert len(path.read_text().splitlines()) == len(content["shared"]) + 10  # a line for each, to be browsed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.update(format="else"), "is not a zoo file of monet_like"),
        (lambda c: c.update(version=True), "is a zoo file of format version True, this package reads 1"),
        (lambda c: c.update(schedules=[]), "it has no schedules"),
        (lambda c: c["schedules"].update({"a@x": 5}), "a@x is no schedule"),
        (
            lambda c: c["schedules"]["a@x"].update(forward=[True]),
            "a@x, is damaged: Expected `int`, got `bool` - at `$.schedule.forward[0]`",
        ),
        (lambda c: c["schedules"]["a@x"].pop("ways"), "a@x, is damaged: it has no field 'ways'"),
        (lambda c: c["shared"].update(version=2), "a@x, was made by an earlier version of monet_like"),
    ],
)
def test_a_damaged_file_of_a_model(tmp_path: Path, change: Callable[[Any], Any], expected: str) -> None:
    path = tmp_path / "resnet18_4.json"
    model_file.save(path, {"a@x": RECORD, "b@x": dataclasses.replace(RECORD, seconds=1.0)})
    damage(path, change)
    with pytest.raises(ScheduleFileError, match=re.escape(expected)):
        model_file.load(path)


def test_unknown_profiles_and_models() -> None:
    result = command("build", "--profiles", "a1000")
    assert result.exit_code == 2 and "there is no profile 'a1000'; choose some of cpu, p100, a100" in result.output
    result = command("build", "resnet5")
    assert (
        result.exit_code == 2 and "the catalogue has no 'resnet5'; choose some of resnet50, googlenet" in result.output
    )


# Downloading --------------------------------------------------------------------------------------------------

NAME = "resnet18_4_10.00@a100"
BIG = dataclasses.replace(RECORD, schedule=Schedule(tuple(range(40_000)), RECORD.schedule.again, RECORD.schedule.ways))


class Server:
    """A real one. ``files``: what it has; ``cuts``: bytes after which the next answers' connections are cut."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.asked = 0
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
        self.asked += 1
        if self.statuses or data is None:
            handler.send_error(self.statuses.pop(0) if self.statuses else 404)
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: self.cuts.pop(0)] if self.cuts else data)
        handler.close_connection = True


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(downloading, "PAUSE", 0.001)
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def zoo_file(path: str, data: bytes) -> ZooFile:
    return ZooFile(path, hashlib.sha256(data).hexdigest(), len(data))


@pytest.fixture(name="file")
def _file(server: Server, tmp_path: Path) -> ZooFile:
    path = tmp_path / "big.json"
    model_file.save(path, {NAME: BIG})
    server.files["resnet18_4.json"] = path.read_bytes()
    return zoo_file("resnet18_4.json", path.read_bytes())


def the_schedule(path: Path) -> ScheduleRecord:
    return model_file.load(path)[NAME]


def nothing_kept(file: ZooFile) -> bool:
    return not list(cached_path(file).parent.glob("*"))


def test_a_good_file_is_fetched_once(server: Server, file: ZooFile) -> None:
    path = download(file, server.url)
    assert path == cached_path(file) and the_schedule(path) == BIG
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert download(file, server.url) == path and server.asked == 1


#: What becomes of a server, and what is said of it.
FAULTS: dict[str, tuple[Callable[[Server, ZooFile], Any], str]] = {
    "another hash": (
        lambda server, file: server.files.update({file.path: bytes(file.bytes)}),
        "is not the file that the registry names",
    ),
    "truncated": (
        lambda server, file: server.files.update({file.path: server.files[file.path][:1000]}),
        r"broke off after \d+ of BYTES bytes .*run again",
    ),
    "too large": (
        lambda server, file: server.files.update({file.path: server.files[file.path] + b"more"}),
        "is larger than the BYTES bytes",
    ),
    "not there": (lambda server, file: server.files.clear(), "cannot be got: status 404 Not Found"),
    "dies half way": (lambda server, file: server.cuts.append(2048), r"broke off after \d+ of BYTES bytes .*run again"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_gives_that_is_wrong_is_told_and_not_used(server: Server, file: ZooFile, fault: str) -> None:
    whole, (spoil, said) = dict(server.files), FAULTS[fault]
    spoil(server, file)
    with pytest.raises(ScheduleFileError, match=said.replace("BYTES", str(file.bytes))):
        download(file, server.url)
    assert server.asked == 1 and nothing_kept(file)
    server.files = whole
    assert the_schedule(download(file, server.url)) == BIG


def test_a_changed_file_in_the_cache_is_fetched_again(server: Server, file: ZooFile) -> None:
    path = download(file, server.url)
    path.write_bytes(b"else")
    assert the_schedule(download(file, server.url)) == BIG


def test_a_server_that_never_ends_is_left(server: Server, file: ZooFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it sends a byte: a download has seconds in all."""
    monkeypatch.setattr(downloading, "LONGEST_SECONDS", 0.0)
    monkeypatch.setattr(downloading, "SLOWEST_BYTES_PER_SECOND", float("inf"))
    with pytest.raises(
        ScheduleFileError, match=rf"broke off after \d+ of {file.bytes} bytes \(it took more than 0 s\)"
    ):
        download(file, server.url)
    assert server.asked == 1 and nothing_kept(file)


def test_a_server_that_fails_for_a_moment_is_asked_again(server: Server, file: ZooFile) -> None:
    server.statuses = [503, 429]
    assert the_schedule(download(file, server.url)) == BIG
    assert server.asked == 3
    cached_path(file).unlink()
    server.statuses = [503] * 9
    with pytest.raises(ScheduleFileError, match="cannot be got: status 503"):
        download(file, server.url)
    assert server.asked == 3 + 1 + downloading.RETRIES


def test_no_server(file: ZooFile, server: Server) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(ScheduleFileError, match=r"broke off after 0 of .*ConnectionError"):
        download(file, server.url)


@pytest.mark.parametrize(
    "url",
    ["file:///etc", "ftp://x/y", "zoo", "http://[::1", "http://", "http://:80/zoo", "http://x:99999", "https://x:y"],
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not an address to download from"):
        base_url(url)
    result = command("download", "resnet50_184_10.00", "--base-url", url)
    assert result.exit_code == 2 and f"error: {url.rstrip('/')!r} is not an address" in result.stderr


def test_the_address_and_the_folder_are_configurable(
    server: Server, file: ZooFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = listed_as("resnet18_4_10.00", "a100", "cuda")
    Registry(tmp_path / "zoo", (listed,), (), (file,)).save()
    monkeypatch.setenv("MONET_LIKE_ZOO", str(tmp_path / "zoo"))
    with pytest.raises(UsageError, match="there is no address to download from; give --base-url, or set MONET_LIKE_Z"):
        find_record(listed.name)
    result = command("download", listed.name, "--base-url", server.url)
    assert result.exit_code == 0 and result.output.strip() == str(cached_path(file))
    cached_path(file).unlink()
    monkeypatch.setenv("MONET_LIKE_ZOO_URL", server.url + "/")
    assert find_record(f"zoo:{listed.full_name}") == BIG and cached_path(file).exists()
    monkeypatch.delenv("MONET_LIKE_ZOO_URL")
    assert find_record(listed.name) == BIG  # cached
    assert server.asked == 2
    shown = command("show", listed.name)
    assert shown.exit_code == 0 and "captured as on cuda, without one" in shown.output and file.sha256 in shown.output
    here = tmp_path / "zoo" / file.path
    here.write_bytes(server.files[file.path])
    assert find_record(listed.name) == BIG  # the folder comes first
    here.write_bytes(b"else")
    with pytest.raises(ScheduleFileError, match="is not the file that the registry names"):
        find_record(listed.name)


# Commands -----------------------------------------------------------------------------------------------------


def test_list_and_show() -> None:
    listed = ZOO.schedules[0]
    result = command("list", "--profile", listed.profile)
    assert result.exit_code == 0 and listed.name in result.output
    content = json.loads(command("list", "--json").output)
    assert len(content["schedules"]) == len(ZOO.schedules)
    assert json.loads(command("show", listed.full_name, "--json").output)["sha256"] == ZOO.file_of(listed).sha256


def test_a_measured_schedule_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (listed,) = (f for f in ZOO.schedules if f.kind == "measured")
    for name in (listed.path, listed.profile_source):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / "solutions" / name).read_bytes())
    monkeypatch.setenv("MONET_LIKE_ZOO", str(tmp_path))
    files = (str(tmp_path / listed.path), str(tmp_path / listed.profile_source))
    result = command("add", "resnet50", listed.profile, *files)
    assert result.exit_code == 0, result.output
    assert Registry.load(tmp_path).schedules == (listed,)
    result = command("verify", "--no-simulate")
    assert result.exit_code == 0 and "1 schedules: hashes and contents" in result.output
    result = command("add", "resnet50", "h100", *files)
    assert result.exit_code == 2 and "the machine's name 'h100' must be of a-z" in result.output
    result = command("add", "resnet50", listed.profile, str(ROOT / "solutions" / listed.path), files[1])
    assert result.exit_code == 2 and "must be in the zoo's folder" in result.output


def test_tables(tmp_path: Path) -> None:
    registry = some_registry(tmp_path)
    text = markdown(registry)
    assert "## resnet18, batch 4" in text and "plain PyTorch takes 16.00 GB" in text
    assert "| `zoo:` name | cpu-2-threads (measured) | a100 | h100 | cpu |" in text
    assert "| resnet18_4_10.00 |" + " 8.00 GB, 1.25 s, +25.0 % |" * 4 in text
    assert "Files: [resnet18_4.json](resnet18_4.json), [measured.json](measured.json)." in text
    assert "| vgg16_4_5.00 | proven infeasible; 5.50 GB will do |" in text
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
