"""The manual's pictures, drawn anew by every build: `python docs/pictures.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import networkx as nx
import pandas
import torch
import torchvision
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from monet_like.capture.captured import fake_mode
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.ir.defaults import MODE
from monet_like.ir.simulate import Report
from monet_like.ir.units import GIB, Budget
from monet_like.job.job import Job
from monet_like.job.solved import SolvedPlan
from monet_like.profile.devices import DEVICES
from scripts import house

matplotlib.use("Agg")
from matplotlib import pyplot

VALUE, TASK, SLOT = "#cfe3f7", "#fbe3b5", "#e3d5f2"
BATCH, SHARE = 64, 0.55
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
#: Where a box of the package stands from left to right; its height follows from its imports.
COLUMNS = {
    "cli": 2.0, "integrations": 0.8, "auto": 1.2, "export": 3.6, "inductor": 3.4, "job": 2.2, "report": 2.5,
    "compiler": 1.2, "replay": 2.5, "variants": 0.0, "profile": 1.3, "capture": 0.6,
    "runtime": 1.3, "nn": 0.0, "ops": 0.3, "plan": 3.3, "zoo": 4.4, "build": 1.2, "ir": 2.3, "files": 1.6,
    "solvers": 3.3,
    "models": 5.3, "testing": 4.7,
    "toolchain": 1.0, "torch_versions": 0.2,
}  # fmt: skip


def draw_all(folder: Path) -> None:
    """Every picture, as SVG."""
    folder.mkdir(exist_ok=True)
    # Text stays text, and equal pictures are equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "monet_like", "font.size": 9}):
        draw_program(folder / "program.svg")
        draw_memory(folder / "memory.svg")
        draw_house(folder / "house.svg")
        draw_planner(folder / "planner.svg")
        draw_gpu(folder / "gpu.svg")
        draw_lora(folder / "lora.svg")


def draw_program(path: Path) -> None:
    """Convolution, batch norm and ReLU as values, tasks and slots."""
    figure, axes = pyplot.subplots(figsize=(8.6, 3.8), layout="constrained")
    axes.set(xlim=(-0.2, 10.4), ylim=(0.1, 4.7))
    axes.axis("off")

    def box(x: float, y: float, text: str, colour: str, width: float = 1.3) -> FancyBboxPatch:
        shape = "round,pad=0.04,rounding_size=0.18" if colour == VALUE else "square,pad=0.04"
        patch = FancyBboxPatch((x - width / 2, y - 0.22), width, 0.44, shape, facecolor=colour, edgecolor="#555")
        axes.add_patch(patch)
        axes.text(x, y, text, ha="center", va="center")
        return patch

    def arrow(start: FancyBboxPatch, end: FancyBboxPatch, style: str = "-", bend: float = 0.0) -> None:
        middle = [(patch.get_x() + patch.get_width() / 2, patch.get_y() + 0.22) for patch in (start, end)]
        curve = f"arc3,rad={bend}"
        ends = {"patchA": start, "patchB": end, "shrinkA": 1, "shrinkB": 1}
        style_ = {"arrowstyle": "-|>", "mutation_scale": 9, "linestyle": style, "color": "#555"}
        axes.add_patch(FancyArrowPatch(*middle, connectionstyle=curve, **ends, **style_))

    x = box(0.4, 3.3, "input x", VALUE, 0.9)
    convolution, a = box(2.0, 3.3, "convolution", TASK), box(3.5, 3.3, "a", VALUE, 0.6)
    norm, b = box(5.0, 3.3, "batch_norm", TASK), box(6.5, 3.3, "b", VALUE, 0.6)
    again = box(5.0, 4.3, "batch_norm.apply", TASK, 1.7)
    statistics = box(5.7, 2.4, "mean, invstd", VALUE, 1.3)
    relu, c = box(7.9, 3.3, "relu", TASK, 0.8), box(9.4, 3.3, "output c", VALUE, 1.0)
    pack, bits = box(7.9, 4.3, "relu.pack", TASK, 1.1), box(9.4, 4.3, "bits", VALUE, 0.7)
    for pair in ((x, convolution), (convolution, a), (a, norm), (norm, b), (norm, statistics), (b, relu), (relu, c)):
        arrow(*pair)
    arrow(c, pack)
    arrow(pack, bits)
    arrow(a, again)
    arrow(again, b)
    slots = [
        box(7.9, 1.1, "relu's gradient", SLOT, 1.7),
        box(5.0, 1.1, "batch norm's gradient", SLOT, 2.2),
        box(1.9, 1.1, "convolution's weight gradient", SLOT, 2.9),
    ]
    tangent = box(9.9, 1.1, "∂c", VALUE, 0.5)
    arrow(tangent, slots[0])
    arrow(slots[0], slots[1])
    arrow(slots[1], slots[2])
    for value, slot in ((c, 0), (bits, 0), (b, 0), (a, 1), (statistics, 1), (x, 2)):
        arrow(value, slots[slot], ":", 0.12 if value in (bits, a) else 0.0)
    axes.text(-0.1, 4.55, "forward: tasks write values", fontweight="bold", va="center")
    below = "backward: slots, in autograd's order; dotted: forward values that some way of the slot reads"
    axes.text(-0.1, 0.35, below, fontweight="bold", va="center")
    save(figure, path)


def draw_memory(path: Path) -> None:
    """Memory over the step: plain PyTorch, and a schedule for a share of its peak."""
    found = compiled()
    figure, axes = pyplot.subplots(figsize=(8.6, 3.6), layout="constrained")
    for report, label, colour in (
        (found.ready.plain, "plain PyTorch", "#888888"),
        (found.compiled.plan.report, "schedule", "#1f77b4"),
    ):
        clock, level = timeline(report)
        axes.plot(clock, level, drawstyle="steps-post", linewidth=1.1, color=colour, label=label)
    budget = found.record.budget_bytes / GIB
    axes.axhline(budget, color="#d62728", linewidth=1, linestyle="--", label="budget")
    axes.set(xlabel="predicted ms since the step began", ylabel="GB allocated", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"ResNet-18, batch {BATCH}, A100 rates, by the simulator", fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    save(figure, path)


def draw_house(path: Path) -> None:
    """The packages and modules at the root, each above all that it imports; arrows that others imply are left out."""
    graph = house.boxes(house.arrows())
    graph.remove_nodes_from(["__init__", "__main__", "_version", "errors", "interrupts"])
    floors = [sorted(names) for names in nx.topological_generations(graph.reverse())]
    figure, axes = pyplot.subplots(figsize=(8.6, 5.6), layout="constrained")
    axes.set(xlim=(-0.6, 5.75), ylim=(-0.4, len(floors) - 0.6))
    axes.axis("off")
    patches = {}
    for y, names in enumerate(floors):
        for name in names:
            x, folder = COLUMNS[name], (house.ROOT / house.PACKAGE / name).is_dir()
            colour = VALUE if name in ("ir", "solvers", "plan") else TASK if folder else "#eee"
            shape = FancyBboxPatch(
                (x - 0.38, y - 0.2), 0.76, 0.4, "round,pad=0.03", facecolor=colour, edgecolor="#555", zorder=2
            )
            patches[name] = axes.add_patch(shape)
            axes.text(
                x, y, name.replace("_", "\n"), ha="center", va="center", zorder=3, fontsize=7 if "_" in name else None
            )
    for one, other in nx.transitive_reduction(graph).edges:
        (x, y), (u, v) = (((p := patches[n]).get_x() + 0.38, p.get_y() + 0.2) for n in (one, other))
        style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": "#777", "shrinkA": 1, "shrinkB": 1}
        bend = 0.2 if y - v > 1.5 and abs(x - u) < 0.3 else 0.0
        ends = {"patchA": patches[one], "patchB": patches[other], "connectionstyle": f"arc3,rad={bend}"}
        axes.add_patch(FancyArrowPatch((x, y), (u, v), **style, **ends))
    save(figure, path)


def draw_planner(path: Path) -> None:
    """The stages of the planner's search, between the incumbent above and the bound below."""
    figure, axes = pyplot.subplots(figsize=(8.6, 3.2), layout="constrained")
    axes.set(xlim=(0, 10.4), ylim=(0, 4.2))
    axes.axis("off")

    def box(x: float, y: float, text: str, colour: str, width: float = 1.7) -> None:
        corner, size = (x - width / 2, y - 0.33), (width, 0.66)
        axes.add_patch(FancyBboxPatch(corner, *size, "square,pad=0.03", facecolor=colour, edgecolor="#555"))
        axes.text(x, y, text, ha="center", va="center")

    def arrow(x: float, start: float, end: float) -> None:
        axes.add_patch(FancyArrowPatch((x, start), (x, end), arrowstyle="-|>", mutation_scale=9, color="#555"))

    box(5.2, 3.75, "incumbent: the fastest plan so far, judged by the simulator", VALUE, 10.0)
    box(5.2, 0.4, "bound: no schedule is faster", SLOT, 10.0)
    stages = ("greedy", "parts\n(Lagrangian)", "annealing", "integer\nprogram", "annealing")
    for number, text in enumerate(stages):
        x = 1.05 + 2.07 * number
        box(x, 2.4, text, TASK)
        if number:
            axes.add_patch(
                FancyArrowPatch((x - 1.17, 2.4), (x - 0.9, 2.4), arrowstyle="-|>", mutation_scale=9, color="#555")
            )
            arrow(x - 0.3, 3.38, 2.78)
        arrow(x + 0.3, 2.78, 3.38)
    box(5.2, 1.4, "refined bound, in a thread", TASK, 3.3)
    for x, start in ((3.12, 2.02), (5.2, 1.02), (7.26, 2.02)):
        arrow(x, start, 0.78)
    save(figure, path)


def draw_gpu(path: Path) -> None:
    """Measured steps against measured peaks on a GPU, each in units of plain PyTorch's: from a table of gpu_check."""
    rows = pandas.read_csv(RESULTS / "cuda-nvidia-h200" / "replays.csv")
    rows = rows[rows.status == "measured"].assign(
        peak=rows.peak_bytes / rows.plain_peak_bytes, step=rows.seconds / rows.plain_seconds
    )
    figure, axes = beside_plain(1, "plain PyTorch")
    for (model, found), marker in zip(rows.groupby("model", sort=False), "osD^vPXh", strict=False):
        plans = found[found.budget_bytes > 0].sort_values("peak")
        name = model.partition("(")[0].rpartition(".")[2] + f", batch {plans.batch.iloc[0]}"
        (line,) = axes.plot(plans.peak, plans.step, marker=marker, label=name, markersize=5)
        rival = found[found.budget_bytes == 0]
        axes.plot(rival.peak, rival.step, "x", color=line.get_color(), markersize=9, markeredgewidth=2)
    axes.plot([], [], "x", color="#555", markersize=9, markeredgewidth=2, label="checkpoint per block")
    axes.set(xlabel="peak memory, plain PyTorch's = 1", ylabel="step, plain PyTorch's = 1", xlim=(0.2, 1.03))
    save_with_legend(figure, axes, path)


def draw_lora(path: Path) -> None:
    """Measured steps of LoRA against measured peaks, in units of plain PyTorch's on the same card."""
    families = (
        ("checkpoint", "gradient checkpointing", "x"),
        ("Liger", "Liger's kernels, without and with checkpointing", "P"),
        ("compiled", "torch.compile of each layer, budgets 1, 0.5, 0.2 (H200)", "s"),
        ("planned", "planned", "o"),
        ("inductor", "planned, backend='inductor'", "D"),
    )
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind, *_ in families}
    for card in ("cuda-nvidia-h100-80gb-hbm3", "cuda-nvidia-h200"):
        rows = pandas.read_csv(RESULTS / card / "decoder_steps.csv").set_index("contender")
        plain = rows.loc["plain"]
        for name, row in rows.drop(index="plain").iterrows():
            said = str(name)
            kind = next((k for k in ("inductor", "planned", "compiled") if k in said), said.partition(",")[0])
            found[kind].append((row.peak_bytes / GIB, row.seconds / plain.seconds))
    figure, axes = beside_plain(plain.peak_bytes / GIB, "plain")
    for kind, label, marker in families:
        axes.plot(*zip(*sorted(found[kind]), strict=True), marker=marker, label=label, markersize=6, linewidth=1)
    axes.set(xlabel="peak memory, GB", ylabel="step, plain's = 1", xlim=(10, 60))
    save_with_legend(figure, axes, path)


def beside_plain(peak: float, name: str) -> tuple[pyplot.Figure, pyplot.Axes]:
    """Axes of steps over peaks, with plain PyTorch's step, which is 1, at its peak."""
    figure, axes = pyplot.subplots(figsize=(8.6, 3.6), layout="constrained")
    axes.axhline(1, color="#999", linewidth=0.8)
    axes.plot(peak, 1, "*", color="#555", markersize=11)
    axes.annotate(name, (peak, 1), (-6, 6), textcoords="offset points", ha="right")
    return figure, axes


def save_with_legend(figure: pyplot.Figure, axes: pyplot.Axes, path: Path) -> None:
    """With the legend on the right."""
    axes.legend(fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def compiled() -> SolvedPlan:
    """ResNet-18 planned by the local search, which gives the same plan every time."""
    model = torchvision.models.resnet18().train()
    with fake_mode():
        images = torch.empty(BATCH, 3, 224, 224)
    request = Request(model, ((images,), {}), MODE, strategy="heuristic", target=torch.device("cuda", 0))
    return Job(request, torch.device("cpu"), Given(DEVICES["a100"])).plan(Budget(share=SHARE))


def timeline(report: Report) -> tuple[list[float], list[float]]:
    """Milliseconds and GB at the start of every run."""
    clock, level, now = [], [], 0.0
    for step in report.steps:
        clock.append(1e3 * now)
        level.append(step.bytes / GIB)
        now += step.seconds
    return clock, level


def save(figure: pyplot.Figure, path: Path) -> None:
    """Without the date, which would make equal pictures differ."""
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
