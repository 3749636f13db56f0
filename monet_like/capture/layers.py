"""Which module of a model each value of its program belongs to, and what a task computes, for people."""

from __future__ import annotations

from ..ir.program import Program, Task
from ..runtime.operators import overload
from .captured import Captured

#: Where memory lies that no module made.
OUTSIDE = "(inputs and loss)"
#: Operators of one task that are named; of more, the last is.
_NAMED = 3


def layers_of(captured: Captured, program: Program) -> list[str]:
    """The module to which each value of ``program`` belongs, or the function that the model itself calls:
    ``flatten()``.

    The module is the owner of a parameter or of the parameter whose gradient it is, else the one in whose call the
    value, or what its maker reads, was made. A parameter of the model itself has its own name.
    """
    known = {value: layer for value, layer in captured.layers.items() if layer}
    outermost = captured.layers.keys() - known.keys()
    for name, value in (*captured.parameters, *captured.buffers):
        known[value] = name.rpartition(".")[0] or name
    for index, tensor in captured.parameter_gradients:
        known[tensor.value] = known[captured.parameters[index][1]]
    for task in program.every_task():
        near = next((known[v] for v in (*task.writes, *reversed(task.reads)) if v in known), None)
        called = f"{operator_of(task)}()"
        for value in task.writes:
            if value in outermost and (near is None or program.values[value].kind != "backward"):
                known.setdefault(value, called)
            elif near is not None:
                known.setdefault(value, near)
    return [known.get(v, OUTSIDE) for v in range(len(program.values))]


def operator_of(task: Task) -> str:
    """What a task computes: ``convolution``, ``leaky_relu_backward + native_batch_norm_backward``, or for kernels of
    ours what they take the place of, such as ``instance_norm_leaky_relu``; views are left out.
    """
    found: dict[str, None] = {}
    for call in task.calls:
        namespace, _, rest = call.op.partition(".")
        if namespace not in ("aten", "operator"):
            return task.variant.partition(".")[0] if task.variant != "aten" else call.op.rpartition(".")[0]
        if namespace == "aten" and not overload(call.op).is_view and not rest.startswith("empty"):
            found[rest.partition(".")[0]] = None
    names = list(found) or [call.op.split(".")[1] for call in task.calls[-1:]]
    return " + ".join(names) if len(names) <= _NAMED else names[-1]
