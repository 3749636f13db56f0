"""Settings of Inductor within a plan."""

from __future__ import annotations

from typing import Any

#: Settings of Inductor that a plan needs. It may not sort kernels anew; a buffer is freed after its last use, not kept
#: for the next of its size; tensors keep the layouts that the graph says they have; and Inductor writes no elementwise
#: result to memory because it is made from many tensors (8 on GPUs, 12 on the CPU) or by many operators: the plan
#: decides that.
SETTINGS: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "allow_buffer_reuse": False,
    "layout_optimization": False,
    "realize_acc_reads_threshold": 10**6,
    "realize_opcount_threshold": 10**6,
}
