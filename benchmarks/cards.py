"""Which card trains which model: the longest context or the largest batch, and the seconds of a step.

    python -m benchmarks.cards                      # all models: an hour of two cores
    python -m benchmarks.cards "Flux.1" "SDXL"      # those with one of these words in their title

All of it is predicted, by `monet-like fits`: no card is needed. Each model's rows are kept as CSV, and the table is
made of all that are there. Flux.1, Wan and SDXL need ``diffusers`` and ``peft``.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas
from click.testing import CliRunner

from benchmarks.rows import markdown_table
from monet_like.cli import main
from monet_like.ir.units import format_bytes, format_seconds
from monet_like.profile.devices import DEVICES

RESULTS = Path(__file__).parent / "results" / "cards"
#: A card of each size that people have, 8 to 80 GB.
CARDS = ("rtx3070", "rtx4070", "rtx4080", "rtx4090", "a100", "h100")


@dataclass(frozen=True)
class Model:
    """A model and how it is trained.

    Attributes:
        title: for people.
        command: of `monet-like fits`, without cards.
        largest: what the table has the largest of.
    """

    title: str
    command: str
    largest: str = "length"

    @property
    def path(self) -> Path:
        """Of its rows."""
        return RESULTS / ("".join(c if c.isalnum() else "_" for c in self.title.lower()) + ".csv")

    @property
    def arguments(self) -> list[str]:
        """Of the whole command, but for the file."""
        return ["fits", *shlex.split(self.command), "--cards", ",".join(CARDS), "--largest", self.largest]


MODELS = (
    Model("Llama 8B, LoRA in 16 bits", "8B --lora 16 --seq 4096"),
    Model("Llama 8B, QLoRA", "8B --lora 16 --quant nf4 --seq 4096"),
    Model("Qwen3 32B, LoRA in 16 bits", "benchmarks/models/qwen3_32b.json --lora 16 --seq 4096"),
    Model("Qwen3 32B, QLoRA", "benchmarks/models/qwen3_32b.json --lora 16 --quant nf4 --seq 4096"),
    Model("Llama 70B, LoRA in 16 bits", "llama_70b --lora 16 --seq 4096"),
    Model("Llama 70B, QLoRA", "llama_70b --lora 16 --quant nf4 --seq 4096"),
    Model("Flux.1, LoRA in 16 bits", "examples/diffusion_steps.py:flux"),
    Model("Wan 14B, LoRA in 16 bits", "examples/diffusion_steps.py:wan"),
    Model("SDXL, LoRA in 16 bits", "examples/diffusion_steps.py:sdxl", "batch"),
)


def asked(model: Model) -> None:
    """Write a model's rows.

    Raises:
        SystemExit: the command has failed.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = CliRunner().invoke(main, [*model.arguments, "--csv", str(model.path)])
    print(found.output, flush=True)
    if found.exit_code:
        raise SystemExit(f"{shlex.join(['monet-like', *model.arguments])} failed")


def table() -> str:
    """The table in Markdown, of the rows that are kept; each model's command stands below its cells."""
    lines, commands = [], []
    for model in MODELS:
        if not model.path.exists():
            continue
        rows = pandas.read_csv(model.path)
        cells = [_cell(rows[rows.card == card], model) for card in CARDS]
        lines.append([model.title, *cells])
        commands.append(f"monet-like {shlex.join(model.arguments)}")
    return f"{markdown_table(['', *CARDS], lines)}\n\n```bash\n" + "\n".join(commands) + "\n```\n"


def _cell(rows: pandas.DataFrame, model: Model) -> str:
    """The best way of ours on a card."""
    ours = rows[rows.way.isin(("ours", "host"))]
    longest = ours.loc[ours.largest.idxmax()]
    most = f"{int(longest.largest):,}" if longest.largest else "-"
    if longest.largest_host_bytes:
        most += f" with {format_bytes(int(longest.largest_host_bytes))} of the host"
    fitting = ours[ours.fits]
    if fitting.empty:
        return most
    best = fitting.loc[fitting.seconds.idxmin()]
    host = f", {format_bytes(int(best.host_bytes))} of the host" if best.host_bytes else ""
    return f"{most}; {format_seconds(float(best.seconds))}{host}"


#: What others have published, beside which the table may be read.
PUBLISHED = """
## What others have published

Theirs, measured on other software of other dates; not repeated here.

| what | figure | by |
|---|---|---|
| Llama 8B, QLoRA of rank 32, batch 1: longest context on 8, 12, 16, 24, 40, 80 GB | 2,972; 21,848; 40,724; 78,475; 153,977; 342,733 | Unsloth's documentation |
| the same with Transformers and FlashAttention 2 | none; 932; 2,551; 5,789; 12,264; 28,454 | Unsloth's documentation |
| Llama 8B, two packed samples of 2,048 tokens, RTX 4090, compiled | LoRA 16.2 GiB, 3,083 tokens a second; QLoRA 7.4 GiB, 2,413 | torchtune's README |
| Flux.1, LoRA of rank 16 | more than 30 GB in 16 bits, 18 in int8, 13 in int4, 9 in NF4 | SimpleTuner's documentation |
| swapped blocks of frozen weights: time lost without pinned memory and copies one way, and with them | about 50 %; about 10 % | musubi-tuner, pull request 972 |
"""  # noqa: E501

PAGE = """# Cards and models

Which card trains which model, predicted from data sheets by `python -m benchmarks.cards`. No card has run these.

A cell has the longest context in tokens that a plan of ours fits (Flux.1 and Wan: tokens of the image or the video;
SDXL: the largest batch of images of 1024 x 1024). Then come the seconds of a forward and a backward at 4,096 tokens
(Wan: 32,760, which are 81 frames of 832 x 480; SDXL: one image). Both say how much of the host's memory they take, for
frozen weights ([streamed weights](../../../docs/streamed_weights.md)) and for activations
([offloading](../../../docs/offload.md)); the host is taken to have it. Where a cell has no seconds, that size does
not fit. 5 % of each card, at least 1 GB, stay free, as with `memory_budget="card"`. The optimizer's own time is left
out.

"""


def page() -> str:
    """The page in Markdown."""
    sizes = ", ".join(f"{card} {format_bytes(DEVICES[card].memory_bytes)}" for card in CARDS)
    return f"{PAGE}{sizes}.\n\n{table()}{PUBLISHED}"


if __name__ == "__main__":
    words = [word.lower() for word in sys.argv[1:]]
    for each in MODELS:
        if not words or any(word in each.title.lower() for word in words):
            asked(each)
    (RESULTS / "cards.md").write_text(page())
