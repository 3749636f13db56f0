"""Compares the results of a training step with plain PyTorch's, tensor by tensor.

Two steps that compute the same in another order differ by rounding. How much that may be is known for no tensor in
advance: the gradient of a bias before a batch norm is zero, so that all of it is rounding, and one ReLU whose input is
near zero moves every gradient before it. So the judgement has three limits:

1. Up to `TOLERANCE`, relative to the tensor itself, a difference is right; up to `TF32_TOLERANCE` where TF32 computes,
  up to
   `TRANSFORM_TOLERANCE` where a schedule's convolutions transform their tensors.
2. Beyond that it may be `ROUNDING_FACTOR` times the difference that rounding alone makes **to this tensor** in plain
   PyTorch. The caller measures it, by steps of plain PyTorch in float64 or with weights changed in the last places.
3. In the mean it may never be more than `MOST` relative to the tensor itself, however much rounding there is. The
   exception is a tensor that is zero but for rounding. It is known by its size: it may differ by `MOST_UNITS` units in
   the last place of the largest tensor of its kind, and no more; by `MOST_UNITS_OF_NOISE`, where rounding alone changes
   it by its own size, because what is left of a sum grows with the number of its terms.

A difference is taken in two norms, the root of the mean square and the largest absolute value, and must pass in both:
the first finds what is spread over a tensor, the second what is wrong in one row of an embedding. Neither depends on
how many elements a tensor has. Limit 3 is for the first alone, since rounding may move a single element by any amount.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

#: The tensors after a step, by name. The first word of a name is its kind: ``output``, ``gradient`` or ``buffer``.
Tensors = Mapping[str, "torch.Tensor | None"]

#: By name, how far a tensor is from another: the root of the mean square, and the largest absolute value.
Differences = Mapping[str, tuple[float, ...]]

#: Relative difference that changed arithmetic may cause, by bytes per real number.
TOLERANCE = {8: 1e-10, 4: 1e-4, 2: 2e-2}
#: The same for float32 where products run in TF32: eight times its unit roundoff of 2**-11, 0.4 %. One product differs
#: by about one, n in a row by about the root of n.
TF32_TOLERANCE = 8 * 2.0**-11
#: The same for float32 where a schedule takes convolutions by FFT or Winograd: sums of transformed tiles, whose
#: differences cancel. (U-Net at batch 11 on a GPU, one weight's gradient by Winograd: 2e-4 from the products', where
#: sums alone differ by 2e-6.)
TRANSFORM_TOLERANCE = 1e-3
#: A difference may be this many times the difference that rounding alone makes in plain PyTorch.
ROUNDING_FACTOR = 4.0
#: Relative difference that no rounding excuses. (Plain ResNet-18 under autocast to bfloat16 is 0.5 from float64.)
MOST = 0.75
#: The same for tensors that are zero but for rounding: in units in the last place of the largest tensor of their kind
#: (`torch.finfo.eps`, of the dtype that was computed in), but no more than `MOST` of it.
MOST_UNITS = 32.0
#: The same where rounding alone changes a tensor by its own size. (MobileNetV2 at batch 272 on a GPU: the bias of a
#: batch norm that another one follows, a sum of 3.4 million terms, is 40 units of noise.)
MOST_UNITS_OF_NOISE = 256.0


@dataclass(frozen=True)
class Verdict:
    """How one tensor compares with plain PyTorch's.

    Attributes:
        name: such as ``gradient of conv1.weight``.
        error: relative difference, the larger of the two norms; 0 for equal bits, infinite for what cannot be compared.
        rounding: the same between plain PyTorch and the steps that differ from it by rounding alone.
        allowed: the largest allowed ``error``.
        reason: why it is wrong, in words; "" if it is right.
    """

    name: str
    error: float
    rounding: float = 0.0
    allowed: float = 0.0
    reason: str = ""

    @property
    def right(self) -> bool:
        """Whether the tensor equals plain PyTorch's up to rounding."""
        return not self.reason


def differences(plain: Tensors, other: Tensors, known: Differences | None = None) -> Differences:
    """The differences between the results of two steps, by name; the larger of them and ``known``.

    Args:
        plain, other: tensors after plain PyTorch's step, and after one with other rounding, such as in float64.
        known: of further such steps. Their tensors need not be kept.
    """
    made = dict(known or {})
    for name, tensor in plain.items():
        if tensor is not None and _is_real(tensor):
            apart = _apart(tensor, other.get(name))
            made[name] = tuple(map(max, apart, made.get(name, apart)))
    return made


def compare(
    plain: Tensors, found: Tensors, rounding: Differences | None = None, *, eps: float = 0.0, tf32: bool = False,
    transforms: bool = False,
) -> tuple[Verdict, ...]:  # fmt: skip
    """Compare the results of a step (outputs, gradients, buffers) with plain PyTorch's.

    Args:
        plain: tensors after plain PyTorch's step.
        found: tensors after the step in question.
        rounding: `differences` to steps of plain PyTorch that differ from ``plain`` by rounding alone.
        eps: `torch.finfo.eps` of the dtype that was computed in, where that is not the tensors' own (autocast, TF32).
        tf32: products of float32 may have run in TF32.
        transforms: convolutions of the step in question may have run by FFT or Winograd.

    Returns:
        A verdict for every name in either.
    """
    rounding = rounding or {}
    least = max(TF32_TOLERANCE * tf32, TRANSFORM_TOLERANCE * transforms)
    scales = {name: _norms(tensor) for name, tensor in plain.items() if _is_real(tensor)}
    largest = {
        kind: tuple(map(max, zip(*(scale for name, scale in scales.items() if _kind(name) == kind), strict=True)))
        for kind in map(_kind, scales)
    }
    verdicts = []
    for name in (*plain, *(name for name in found if name not in plain)):
        if name not in plain or name not in found:
            where = "plain PyTorch" if name in found else "this step"
            verdicts.append(Verdict(name, math.inf, reason=f"{where} leaves no {name}"))
            continue
        mine = plain[name]
        if reason := _incomparable(mine, found[name]):
            verdicts.append(Verdict(name, math.inf, reason=reason))
        elif mine is None or same_bits(mine, found[name]):
            verdicts.append(Verdict(name, 0.0))
        elif name not in scales:
            verdicts.append(Verdict(name, math.inf, reason="is of whole numbers and differs"))
        else:
            errors, roundings = _apart(mine, found[name]), rounding.get(name, (0.0, 0.0))
            of_dtype = least if mine.dtype == torch.float32 else 0.0
            sizes = scales[name], largest[_kind(name)]
            verdicts.append(_judge(name, mine.dtype, errors, roundings, *sizes, eps, of_dtype))
    return tuple(verdicts)


def _judge(
    name: str, dtype: torch.dtype, errors: tuple[float, ...], roundings: tuple[float, ...], scales: tuple[float, ...],
    largest: tuple[float, ...], eps: float, least: float,
) -> Verdict:  # fmt: skip
    """The verdict on a tensor of real numbers that differs: by the norm that is nearer to its tolerance.

    ``least``: the least tolerance, relative to the tensor itself.
    """
    eps = max(eps, torch.finfo(dtype).eps)
    tolerance = max(least, TOLERANCE.get(dtype.to_real().itemsize, 0.0))
    units = MOST_UNITS_OF_NOISE if roundings[0] >= scales[0] else MOST_UNITS
    most_in_mean = max(MOST * scales[0], min(MOST, units * eps) * largest[0])
    verdicts = []
    for error, rounding, own, top, most in zip(
        errors, roundings, scales, largest, (most_in_mean, math.inf), strict=True
    ):
        allowed = max(tolerance * own, min(ROUNDING_FACTOR * rounding, most))
        unit = own or top or 1.0
        reason = "" if error <= allowed else f"differs by {error / unit:.2e}, {allowed / unit:.2e} is allowed"
        verdicts.append(Verdict(name, error / unit, rounding / unit, allowed / unit, reason))
    return max(verdicts, key=lambda verdict: (not verdict.right, verdict.error / (verdict.allowed or 1e-300)))


def same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors have equal dtype, shape and elements; NaN equals NaN."""
    if other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def _incomparable(mine: torch.Tensor | None, other: torch.Tensor | None) -> str:
    """The reason why two results cannot be compared as numbers; "" if they can."""
    if mine is None or other is None:
        return "" if mine is other else "is missing" if other is None else "exists, and plain PyTorch makes none"
    if mine.shape != other.shape:
        return f"has shape {list(other.shape)}, not {list(mine.shape)}"
    if mine.dtype != other.dtype:
        return f"has dtype {other.dtype}, not {mine.dtype}"
    if _is_real(mine):
        finite = mine.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return "has NaN or infinity where plain PyTorch has a number, or the reverse"
        if not same_bits(mine[~finite], other[~finite]):
            return "has another infinity or NaN than plain PyTorch"
    return ""


def _is_real(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def _kind(name: str) -> str:
    return name.partition(" ")[0]


def _apart(mine: torch.Tensor, other: torch.Tensor | None) -> tuple[float, ...]:
    """Norms of a difference, over elements that are finite in both; nothing if the shapes differ."""
    if other is None or mine.shape != other.shape:
        return 0.0, 0.0
    wide = torch.complex128 if mine.is_complex() else torch.float64
    return _norms(mine.to(wide) - other.to(mine.device, wide))


def _norms(tensor: torch.Tensor | None) -> tuple[float, ...]:
    """Root mean square and largest absolute value of the finite elements; 0 if there are none."""
    assert tensor is not None
    numbers = tensor[tensor.isfinite()].abs().double()
    if not numbers.numel():
        return 0.0, 0.0
    most = float(numbers.max())
    return most * float((numbers / (most or 1.0)).square().mean().sqrt()), most
