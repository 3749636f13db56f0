"""The gallery's pictures: `python docs/gallery.py FOLDER` plans six models, writes their reports into the folder, and
draws the memory of each into docs/images. A plan that is in the folder is not made again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from monet_like.cli.group import main
from monet_like.cli.report import report
from monet_like.cli.terminal import Terminal
from monet_like.ir.units import GIB
from monet_like.report.charts import COLOURS
from monet_like.report.figures import KINDS, Course, Run
from monet_like.report.page import Figures

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).resolve().parent
#: How many places of a step are drawn; each shows the run between two of them that needs most.
PLACES = 100
CARDS = {"a100": "an A100", "rtx4090": "an RTX 4090"}


@dataclass(frozen=True)
class Picture:
    """A model of the gallery.

    Attributes:
        name: of the picture's file.
        title: for people.
        model, batch, budget, options: words of ``monet-like solve``.
        card: a key of `monet_like.profile.devices.DEVICES`, whose datasheet gives the rates.
    """

    name: str
    title: str
    model: str
    batch: int
    budget: str
    card: str
    options: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of ``monet-like``."""
        rates = ("--device", "cuda", "--profile", f"roofline:{self.card}", "--strategy", "heuristic")
        return ("solve", self.model, str(self.batch), self.budget, *self.options, *rates)


PICTURES = (
    Picture("resnet50", "ResNet-50, batch 184", "torchvision.models.resnet50()", 184, "50%", "a100"),
    Picture(
        "llama_lora",
        "Llama 3.2 1B, LoRA, 4 x 2,048 tokens, bfloat16 autocast",
        "docs/gallery/llama_lora.py:make_model",
        4,
        "60%",
        "rtx4090",
        ("--autocast", "bfloat16"),
    ),
    Picture(
        "nnunet",
        "nnU-Net (large preset), batch 2, float16 autocast",
        "monet_like.models.volumes.nnunet_large(192, 256, 224)",
        2,
        "75%",
        "rtx4090",
        ("--autocast", "float16", "--optimizer", "momentum"),
    ),
    Picture(
        "sdxl_unet",
        "U-Net of SDXL, LoRA, one image of 1,024 x 1,024, bfloat16",
        "docs/gallery/sdxl_unet.py:make_model",
        1,
        "60%",
        "rtx4090",
        ("--dtype", "bfloat16"),
    ),
    Picture(
        "gnn", "GraphSAGE, 800,000 nodes, 8 million edges", "docs/gallery/gnn.py:make_model", 800_000, "65%", "rtx4090"
    ),
    Picture("gpt2", "GPT-2, 8 x 1,024 tokens", "monet_like.zoo.models.gpt2()", 8, "50%", "a100"),
)


def draw_all(folder: Path, names: Sequence[str] = ()) -> None:
    """Draw all pictures, or those of these names."""
    folder.mkdir(exist_ok=True)
    for picture in PICTURES:
        if not names or picture.name in names:
            file = folder / f"{picture.name}.json"
            if not file.exists():
                done = CliRunner().invoke(main, [*picture.words, "--out", str(file)])
                if done.exit_code:
                    raise SystemExit(f"{picture.name}: {done.output}")
            figures = report(
                file=file, model=picture.model, out=None, png=False, front="off", live=False, device="cuda",
                profile_file=None, time_limit=60.0, csv_file=None, terminal=Terminal(),
            )  # fmt: skip
            draw(picture, figures, HERE / "images" / f"gallery_{picture.name}.svg")


def draw(picture: Picture, figures: Figures, path: Path) -> None:
    """Memory over the step, stacked by kind: plain PyTorch above, the schedule below; on the same axes."""
    plain, ours = figures.plain, figures.ours
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "monet_like", "font.size": 9}):
        figure, both = pyplot.subplots(2, 1, figsize=(8.6, 4.6), layout="constrained", sharex=True, sharey=True)
        kinds = [k for k in range(len(KINDS)) if any(run.bytes[k] for course in (plain, ours) for run in course.runs)]
        longest = max(plain.seconds, ours.seconds)
        for axes, course, who in zip(both, (plain, ours), ("plain PyTorch", "schedule"), strict=True):
            clock, runs = highest(course, longest)
            levels = [[run.bytes[k] / GIB for run in runs] for k in kinds]
            colours = [COLOURS[list(KINDS)[k]] for k in kinds]
            axes.stackplot(clock, levels, colors=colours, labels=[list(KINDS.values())[k] for k in kinds], step="post")
            axes.axhline(figures.record.budget_bytes / GIB, color="#d6404b", linewidth=1, linestyle="--")
            peak, ms = course.peak.total_bytes / GIB, 1e3 * course.seconds
            axes.set_title(f"{who}: {peak:.1f} GB, {ms:.0f} ms", fontsize=9, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylabel("GB")
        both[0].set(xlim=(0, 1e3 * longest), ylim=(0, None))
        both[1].set_xlabel("ms since the step began")
        figure.suptitle(f"{picture.title}: predicted for {CARDS[picture.card]} by its datasheet's rates", fontsize=10)
        figure.legend(
            *both[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False
        )
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    path.write_text(re.sub(r"(\d\.\d)\d+", r"\1", path.read_text()))  # tenths of a point are enough


def highest(course: Course, longest: float) -> tuple[list[float], list[Run]]:
    """Milliseconds, and of each place of the step the run that needs most there; the last one twice, so that it has a
    width.
    """
    width = longest / PLACES
    found: dict[int, Run] = {}
    for run in course.runs:
        first, last = int(run.begins / width), int((run.begins + run.seconds) / width)
        for place in range(first, last + 1):
            if place not in found or found[place].total_bytes < run.total_bytes:
                found[place] = run
    places = sorted(found)
    clock = [1e3 * width * place for place in places]
    return [*clock, 1e3 * min(course.seconds, width * (places[-1] + 1))], [
        *(found[p] for p in places),
        found[places[-1]],
    ]


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]), sys.argv[2:])
