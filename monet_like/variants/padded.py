"""Products of 16-bit matrices with odd rows, padded to even ones, on CUDA.

cuBLAS has its fast kernels for rows of a multiple of 16 bytes. GPT-2's vocabulary of 50,257 words and BERT's of 30,522
have none: the three products of such a head ran at a fifth of the others' rate on an H100. Here the matrices are padded
with zeros before the product, and its result is copied without the padding. Inductor does the same in whole graphs
(``torch._inductor.fx_passes.pad_mm``).

``conv`` admits it: another kernel may add in another order.
"""

from __future__ import annotations

import torch

from ..capture.captured import TensorMeta, make_task
from ..ir.program import Call, Ref, Task
from .calls import HALF, Calls
from .editor import Editor

#: Elements of 16 bits in 16 bytes.
STEP = 8
_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.mm.out"})


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, every task with a product of odd rows, those in parts included, with padding."""
    if editor.device.type != "cuda" or "conv" not in editor.words:
        return
    for anchor, task in [*((task, task) for task in editor.tasks), *editor.added()]:
        if made := _padded(editor, task):
            editor.add(anchor, made.calls, made.writes, made.variant, word="conv", runs=task.runs)
    for ways in editor.slots:
        ways.extend([made for way in list(ways) if (made := _padded(editor, way))])


def _padded(editor: Editor, task: Task) -> Task | None:
    """A task with the products of odd rows padded; None if it has none."""
    if task.overwrites is not None or task.word not in ("", "conv") or not _may_have_some(editor, task):
        return None
    padding = _Padding(editor, task)
    for call in task.calls:
        if call.op not in _PRODUCTS or not padding.product(call):
            padding.calls.append(call)
    if not padding.found:
        return None
    variant = "padded" if task.variant == "aten" else f"{task.variant}_padded"
    name = f"{task.name}.padded"
    return make_task(name, padding.calls, task.writes, editor.metas, variant=variant, word="conv", runs=task.runs)


def _may_have_some(editor: Editor, task: Task) -> bool:
    metas = [editor.metas[value] for value in (*task.reads, *task.writes)]
    odd = any(meta.dtype in HALF and any(extent % STEP for extent in meta.shape) for meta in metas)
    return odd and any(call.op in _PRODUCTS for call in task.calls)


class _Padding:
    """Writes the calls of a task with padding.

    Attributes:
        calls: so far.
        found: whether there was a product to be padded.
    """

    def __init__(self, editor: Editor, task: Task) -> None:
        self.calls = Calls(prefix="padded")  # the task may have temporaries of other variants
        self.found = False
        self._editor, self._task = editor, task
        self._made = editor.results(task.calls)
        #: Padded operands that the task does not make, by what is padded and by how much.
        self._known: dict[tuple[Ref, tuple[int, int]], Ref] = {}

    def product(self, call: Call) -> bool:
        """Write a product [M, K] x [K, N] with padding; False if its rows are even or it cannot be padded."""
        *bias, left, right = call.args
        (out,) = call.outs
        assert out is not None
        sides = ((left, "MK"), (right, "KN"), (out, "MN"))
        leading = [_leading(self._meta(ref), dims) for ref, dims in sides]
        if None in leading or any(self._meta(ref).dtype not in HALF for ref, _ in sides):
            return False
        extents = dict(zip("MKN", (*self._meta(left).shape, self._meta(right).shape[1]), strict=True))
        pads = {dim: -extents[dim] % STEP if dim in leading else 0 for dim in "MKN"}
        cut = [(place, dim) for place, dim in enumerate("MN") if pads[dim]]
        if not any(pads.values()) or (cut and (call.kwargs or not self._meta(out).contiguous)):
            return False
        if bias and (len(self._meta(bias[0]).shape) != 1 or pads["M"]):
            return False
        self.found = True
        operands = [self._operand(ref, (pads[dims[0]], pads[dims[1]])) for ref, dims in sides[:2]]
        if bias and pads["N"]:
            bias = [self.calls.add("aten.constant_pad_nd.default", bias[0], [0, pads["N"]])]
        made = self.calls.again(call, *bias, *operands, out=None if cut else out)
        for place, dim in cut:
            made = self.calls.slice(made, place, 0, extents[dim])
        if cut:
            self.calls.add("aten.clone.default", made, out=out, memory_format=torch.contiguous_format)
        return True

    def _operand(self, ref: Ref, pads: tuple[int, int]) -> Ref:
        """A matrix with rows and columns of zeros behind its own, laid out as it is."""
        if not any(pads):
            return ref
        if (ref, pads) in self._known:
            return self._known[ref, pads]
        turned, (rows, columns) = self._meta(ref).stride[1] != 1, pads
        zeros = [0, rows, 0, columns] if turned else [0, columns, 0, rows]
        made = self.calls.add("aten.t.default", ref) if turned else ref
        made = self.calls.add("aten.constant_pad_nd.default", made, zeros)
        made = self.calls.add("aten.t.default", made) if turned else made
        if self._is_given(ref):
            self._known[ref, pads] = made
        return made

    def _is_given(self, ref: Ref) -> bool:
        """Whether a matrix is a value that the task only reads, or a view of one."""
        while not isinstance(ref.name, int):
            makers = [call for call in self._task.calls if ref in call.outs]
            if len(makers) != 1 or makers[0].op not in ("aten.t.default", "aten.slice.Tensor"):
                return False
            ref = makers[0].args[0]
        return ref.name not in self._task.writes

    def _meta(self, ref: Ref) -> TensorMeta:
        return self._editor.meta_of(ref) or self._made[ref]


def _leading(meta: TensorMeta, dims: str) -> str | None:
    """Of the two dimensions of a matrix the one that its rows in memory are as long as, if they are odd; "" if they are
    even, None in other layouts.
    """
    if meta.stride[1] == 1:
        return dims[1] if meta.stride[0] % STEP else ""
    if meta.stride[0] == 1:
        return dims[0] if meta.stride[1] % STEP else ""
    return None
