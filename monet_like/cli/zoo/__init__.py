"""The code of the commands ``monet-like zoo ...``. Their options are in `monet_like.cli.zoo_commands`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from ...errors import MonetError, UsageError
from ...ir.frames import frame_of
from ...ir.units import format_bytes, format_seconds
from ...zoo.download import cached_path, download, find_record
from ...zoo.registry import Registry, zoo_folder
from ...zoo.rows import Listed
from ..inspect import show_record
from ..output import check_results, write_table
from ..terminal import Terminal, aligned_table


def list_files(*, profile: str, as_json: bool, csv_file: Path | None) -> None:
    """List the registry as a table or as JSON."""
    registry = Registry.load(zoo_folder())
    _check_profile(registry, profile)
    wanted = [listed for listed in registry.schedules if profile in ("", listed.profile)]
    check_results(csv_file)
    terminal = Terminal(as_json=as_json)
    console = terminal.console
    if csv_file is not None:
        write_table(console, csv_file, frame_of(Listed, wanted))
    schedules, refusals = [_all_of(registry, listed) for listed in wanted], [asdict(r) for r in registry.refused]
    terminal.result({"schedules": schedules, "refused": refusals})
    console.print(_table(wanted))
    for refused in registry.refused:
        if profile in ("", refused.profile):
            kind = "proven infeasible" if refused.proven else "none found"
            console.print(f"{refused.full_name}: {kind}")
    console.print(
        "Peaks and steps are predicted: from datasheet rates, but where it says measured. "
        "monet-like zoo show NAME tells all of one."
    )


def _table(wanted: Sequence[Listed]) -> Table:
    """A row for each schedule."""
    table = aligned_table("name", "profile", "predicted peak", "plain peak", "predicted step", "overhead", "gap")
    for listed in wanted:
        table.add_row(
            listed.name,
            f"{listed.profile}, measured" if listed.kind == "measured" else listed.profile,
            format_bytes(listed.peak_bytes),
            format_bytes(listed.plain_peak_bytes),
            format_seconds(listed.seconds),
            f"{100 * listed.overhead:+.1f} %",
            "" if listed.gap is None else f"{100 * listed.gap:.1f} %",
        )
    return table


def show(*, name: str, base_url: str | None, as_json: bool) -> None:
    """Show one schedule: the registry's entry and the content of the file. Of a model: a table of its schedules."""
    registry, terminal = Registry.load(zoo_folder()), Terminal(as_json=as_json)
    if found := registry.of_model(name):
        terminal.result({"schedules": [_all_of(registry, listed) for listed in found]})
        terminal.console.print(_table(found))
        return
    listed = registry.find(name)
    record = find_record(listed.full_name, url=base_url)
    if as_json:
        terminal.result(_all_of(registry, listed))
        return
    table = aligned_table()
    table.add_row("name", listed.full_name)
    rates = "measured" if listed.kind == "measured" else "datasheet rates"
    where = "there" if listed.captured_there else f"as on {listed.device}, without one"
    table.add_row("made for", f"{listed.profile} ({listed.profile_source}, {rates}), captured {where}")
    proven = "none" if listed.gap is None else f"{100 * listed.gap:.2f} % ({listed.bound_kind})"
    table.add_row("solved", f"{listed.solver}, {listed.solve_seconds:.1f} s; gap {proven}")
    file = registry.file_of(listed)
    table.add_row("file", f"{file.path}, {file.bytes} bytes")
    table.add_row("sha256", file.sha256)
    terminal.console.print(table)
    show_record(terminal, record)


def download_files(*, names: Sequence[str], profile: str, base_url: str | None) -> None:
    """Download the files of schedules into the cache."""
    registry = Registry.load(zoo_folder())
    _check_profile(registry, profile)
    schedules = [registry.find(name) for name in names] or [s for s in registry.schedules if profile in ("", s.profile)]
    wanted = list(dict.fromkeys(map(registry.file_of, schedules)))
    console = Console(stderr=True)
    failed: list[str] = []
    with _bar(console) as bar:
        task = bar.add_task("download", total=len(wanted))
        for file in wanted:
            bar.update(task, description=file.path)
            try:
                download(file, base_url)
            except MonetError as error:
                if len(wanted) == 1:
                    raise
                failed.append(f"{file.path}: {error}")
            bar.advance(task)
    for file in wanted if not failed else ():
        click.echo(cached_path(file))
    if failed:
        raise MonetError(f"{len(failed)} of {len(wanted)} files were not downloaded; " + "; ".join(failed))


def verify_files(*, names: Sequence[str], simulated: bool) -> None:
    """Check schedules; stops at the first that fails."""
    from .build import verify

    registry = Registry.load(zoo_folder())
    wanted = [registry.find(name) for name in names] or list(registry.schedules)
    wanted.sort(key=lambda listed: (listed.model, listed.batch, listed.device))  # a model is captured once for each
    with _bar(Console(stderr=True)) as bar:
        task = bar.add_task("verify", total=len(wanted))
        for listed in wanted:
            bar.update(task, description=listed.full_name)
            verify(registry, listed, simulated=simulated)
            bar.advance(task)
    what = "hashes, contents, peaks and steps" if simulated else "hashes and contents"
    click.echo(f"{len(wanted)} schedules: {what} are as the registry says")


def build_files(
    *, names: Sequence[str], profiles: str, out: Path | None, again: bool, evaluations: int | None, processes: int
) -> None:
    """Plan the schedules of the zoo, with a progress bar or, without a terminal, a line for each."""
    from ...zoo.catalogue import PROFILES
    from .build import EVALUATIONS, build, select

    folder = out or zoo_folder()
    console = Console(stderr=True)
    with _bar(console) as bar:
        task = bar.add_task("build", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            if not console.is_terminal:
                click.echo(f"{done} of {total}: {what}", err=True)

        built = build(
            folder,
            entries=select(names),
            profiles=[word.strip() for word in profiles.split(",")] if profiles else PROFILES,
            again=again,
            evaluations=EVALUATIONS if evaluations is None else evaluations,
            processes=processes,
            progress=tell,
        )
    click.echo(
        f"{folder}: {len(built.made)} made, {len(built.kept)} were there, {len(built.refused)} budgets without a "
        "schedule"
    )


def add(*, name: str, machine: str, solution_file: Path, profile_file: Path) -> None:
    """Add a schedule that was planned from a measured profile to the registry."""
    from .build import add_measured

    listed = add_measured(zoo_folder(), solution_file, name, machine, profile_file)
    click.echo(f"the zoo has {listed.full_name}: {format_bytes(listed.peak_bytes)}, {format_seconds(listed.seconds)}")


def print_table(*, write: Path | None, summary_for: str) -> None:
    """Print the registry as Markdown tables, or write them into a file."""
    from .table import markdown, summary, write_into

    registry = Registry.load(zoo_folder())
    _check_profile(registry, summary_for)
    text = summary(registry, summary_for) if summary_for else markdown(registry)
    if write is None:
        click.echo(text)
        return
    write_into(write, text)
    click.echo(f"wrote {write}")


def _check_profile(registry: Registry, profile: str) -> None:
    known = sorted({listed.profile for listed in registry.schedules})
    if profile and profile not in known:
        raise UsageError(f"the zoo has nothing for the profile {profile!r}; give {', '.join(known)}")


def _all_of(registry: Registry, listed: Listed) -> dict[str, object]:
    """All fields of a schedule's registry entry and of its file."""
    return asdict(listed) | asdict(registry.file_of(listed))


def _bar(console: Console) -> Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(*columns, console=console, transient=True)
