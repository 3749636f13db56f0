"""What a schedule file is called by default, and the counts and the kind of attention in it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ..capture.absent_gpu.attention import HALF, KINDS
from ..capture.captured import Captured
from ..capture.precision import weights_layout
from ..ir.program import Program
from ..ir.schedule import kept_values
from ..ir.units import GIB, Budget
from ..nn.sync_batch_norm import among
from ..plan import Plan
from .request import Request


def summary_counts(program: Program, found: Plan) -> dict[str, int]:
    """Counts that describe a schedule: parameters, buffers, values kept for the backward, recomputed tasks, variants
    chosen.
    """
    schedule = found.schedule
    again = Counter(index for tasks in schedule.again for index in tasks)
    made = {v for i in schedule.forward for v in program.tasks[i].writes if program.values[v].bytes}
    kept = kept_values(program, schedule)
    parameters, parameter_bytes = program.parameters
    counts = {
        "parameters": parameters,
        "parameter_bytes": parameter_bytes,
        "buffer_bytes": program.buffer_bytes,
        "slots": len(program.slots),
        "kept": len(kept),
        "dropped": len(made - kept),
        "recomputed": len(again),
        "reruns": sum(again.values()),
    }
    chosen = [program.tasks[i].variant for i in (*schedule.forward, *again.elements())]
    chosen += [program.slots[s][w].variant for s, w in enumerate(schedule.ways)]
    if (processes := among(program)) > 1:
        counts["processes"] = processes
    if found.report.host_bytes:
        counts["host_bytes"] = found.report.host_bytes
    counts.update({f"variant {name}": n for name, n in sorted(Counter(chosen).items()) if name != "aten"})
    return counts


def default_names(name: str, request: Request, budget: Budget, folder: Path) -> Path:
    """Default path of a schedule file, such as ``solution_resnet50_184_inplace_conv_multiway_newnode_10.00.json``.

    A share of plain PyTorch's peak stands there as ``60percent``.
    """
    limit = f"{100 * budget.share:g}percent" if budget.bytes is None else f"{budget.bytes / GIB:.2f}"
    limit = "card" if budget.is_card else limit
    words = [weights_layout(request.model), f"autocast_{request.autocast}" if request.autocast else ""]
    suffix = "".join(f"_{word}" for word in (*words, "ablation" if request.ablation else "") if word)
    return folder / f"solution_{name}_{request.batch}_{request.mode}_{limit}{suffix}.json"


def attention_of(captured: Captured) -> str:
    """The kind of fused attention in 16 bits that plain PyTorch's program has throughout, which a replay has to pin;
    else "".
    """
    found: set[str] = set()
    for task in captured.plain.tasks:
        for call in task.calls:
            kind = call.op.removeprefix("aten._scaled_dot_product_").removesuffix("_attention.default")
            if kind in KINDS and any(captured.metas[v].dtype in HALF for v in task.writes):
                found.add(kind)
    return found.pop() if len(found) == 1 else ""
