"""Thousands of small models from a grammar against plain PyTorch: ``python -m benchmarks.small_models --count 5000``.

``--device cuda`` trains them on a GPU: convolutions without TF32 and by algorithms that give the same bits each time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
from rich.console import Console
from rich.progress import track

from . import verdicts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

if TYPE_CHECKING:
    from small_models import Case, Verdict

#: Cases that a process judges before it says so.
CHUNK = 10


def _set_up() -> None:
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True


def _judged(seeds: Iterable[int], device: str) -> list[tuple[Case, Verdict]]:
    from small_models import Verdict, draw, judge
    from small_models.judging import told

    _set_up()
    found = []
    for seed in seeds:
        case = draw(seed, device)
        try:
            verdict = judge(case)
        except Exception as error:  # what an assertion on a GPU leaves behind fails until the process ends
            verdict = Verdict("crashed", f"judging: {told(error)}")
        found.append((case, verdict))
    return found


def _all(seeds: range, processes: int, device: str) -> Iterator[tuple[Case, Verdict]]:
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    if processes == 1:
        for chunk in chunks:
            yield from _judged(chunk, device)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_judged, chunk, device) for chunk in chunks]):
            yield from done.result()


def _told(case: Case, verdict: Verdict) -> verdicts.Verdict:
    """For the table."""
    from small_models import known_end

    if end := known_end(case, verdict):
        return verdicts.Verdict(f"seed {case.seed}", verdicts.ROUNDING, end)
    status = verdicts.INVALID if verdict.status == "invalid" else verdict.status
    return verdicts.Verdict(f"seed {case.seed}", status, verdict.detail)


@click.command()
@click.option("--count", default=5000, show_default=True, help="Models.")
@click.option("--seed", default=0, show_default=True, help="Of the first model; the others follow.")
@click.option("--processes", default=1, show_default=True, help="That judge models.")
@click.option(
    "--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]), help="That trains them."
)
@click.option("--seconds", default=60.0, show_default=True, help="To make each failure smaller.")
@click.option("--show", default=20, show_default=True, help="Failures, made smaller, to print at most.")
def main(count: int, seed: int, processes: int, device: str, seconds: float, show: int) -> None:
    """Compare models with plain PyTorch; exit code 1 if one is wrong or crashed.

    What differs by rounding where docs/limits.md says that it can is counted apart.
    """
    from small_models import known_end, minimise, reproduction

    _set_up()
    console = Console()
    started = time.monotonic()
    results = _all(range(seed, seed + count), processes, device)
    found = sorted(track(results, "models", count, console=console), key=lambda pair: pair[0].seed)
    title = f"{count} small models in {time.monotonic() - started:.0f} s"
    console.print(verdicts.summary([_told(*pair) for pair in found], title))
    failed = [(case, verdict) for case, verdict in found if verdict.failed and not known_end(case, verdict)]
    for case, verdict in failed[:show]:
        console.rule(f"seed {case.seed}")
        console.print(
            reproduction(*minimise(case, verdict, seconds=seconds)), markup=False, highlight=False, soft_wrap=True
        )
    if len(failed) > show:
        console.print(f"further failures: seeds {', '.join(str(case.seed) for case, _ in failed[show:])}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
