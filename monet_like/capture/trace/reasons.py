"""Why a trace failed, in a sentence with advice."""

from __future__ import annotations

import re
import traceback

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

#: Advice by what the error says: operators whose results have sizes that depend on values, and sizes that change.
_ADVICE = {
    "aten._ctc_loss": (
        "CTC loss with lengths in tensors needs memory that depends on their values; give the lengths as lists of "
        "numbers, or compute the loss outside the model"
    ),
    "aten._pack_padded_sequence": (
        "pack_padded_sequence makes a tensor whose size depends on the lengths' values; give the "
        "recurrent layer the padded sequences, and mask its results"
    ),
    "Attempted to resize": (
        "it resizes a tensor, as observers of torch.ao.quantization do to their buffers in the first call; call the "
        "model once before it is planned, or make the tensor anew"
    ),
    "aten._to_sparse": "to_sparse makes a tensor whose size depends on the values of a tensor; compute with dense ones",
}
#: For a model of which a part cannot be captured.
OTHER_PARTS = (
    "; monet_like.auto_schedule(model, memory_budget=...) finds the largest parts that do not, names them as "
    "blocks=[...], and plans them; the rest runs as it is"
)
#: Likewise, by a file that the error passes through.
_ADVICE_FOR_FILES = {
    "/torch/nn/attention/flex_attention.py": (
        "its attention is flex_attention, which compiles code of its own and cannot be traced by shapes; take "
        "scaled_dot_product_attention, with a mask if need be, or plan the parts around it: auto_schedule(model) finds "
        "them, and blocks=[...] names them"
    ),
    "/triton/": (
        "it launches a Triton kernel itself, as Liger's layers do, and a launch cannot be traced by shapes; take "
        "PyTorch's layers instead (for decoders there are variants in one pass and in tiles of our own), or put the "
        "launch into torch.library.custom_op with a fake and a gradient"
    ),
    "/torch/_higher_order_ops/": (
        "it calls an operator that is given functions, such as torch.cond, which cannot be traced by shapes; compute "
        "without it, as by torch.where of both results, or plan the parts around it: auto_schedule(model) finds them, "
        "and blocks=[...] names them"
    ),
    "/torch/nested/": (
        "it computes with nested tensors, whose sizes depend on their parts; pad them to one length, and mask the rest"
    ),
    "/torch_geometric/utils/loop.py": (
        "its layers replace the self-loops of each graph, whose number depends on values; replace them once, in "
        "the data (torch_geometric.transforms.AddRemainingSelfLoops() or AddSelfLoops()), and make the layers with "
        "add_self_loops=False"
    ),
}


def data_dependent(error: BaseException) -> bool:
    return isinstance(error, DataDependentOutputException) or "data-dependent" in str(error)


def of_values(error: BaseException) -> bool:
    """Whether a trace failed because of what tensors contain: their values, or sizes that depend on these."""
    named = any(operator_ in str(error) for operator_ in ("aten._local_scalar_dense", "aten.nonzero"))
    return data_dependent(error) or isinstance(error, DynamicOutputShapeException) or named


def reason_of(error: BaseException) -> str:
    """A sentence that explains why the trace failed, with the user's line or the operator."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    internal = ("/torch/", "/monet_like/capture/", "/contextlib.py", "/triton/")
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if not any(part in f.filename for part in internal)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    advice = next((said for operator_, said in _ADVICE.items() if operator_ in str(error)), "")
    if not advice:
        of_file = (said for file, said in _ADVICE_FOR_FILES.items() if any(file in frame.filename for frame in every))
        advice = next(of_file, "")
    if advice:
        return f"{advice}{where}"
    if of_values(error):
        message = f"its computation depends on the values of a tensor, not only on shapes: {message}"
        where += OTHER_PARTS
    elif "modified by an inplace operation" in str(error):
        told = re.search(r"\[torch\.\w+ \[[^]]*\]\](, which is output \d+ of \w+)?", message)
        message = (
            f"it overwrites in place what the gradient of one of its results reads ({told[0] if told else message}); "
            "plain PyTorch has no gradient there either: detach() that result, if the loss does not use it, or do not "
            "write in place"
        )
    elif "mutating a non-functional tensor" in str(error):
        message = (
            "a hook or a custom function changes a parameter or a buffer in the backward, and a schedule would not; "
            "change it in the training loop, or plan the parts without it: auto_schedule(model, blocks=[...])"
        )
    elif "requires grad" in str(error) or "require grad" in str(error):
        message = f"nothing in it requires a gradient: {message}"
    return f"{type(error).__name__}: {message}{where}"
