"""Is what comes back what was promised? Every value, in float64, a slab at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.coding import layout
from lowtide.records import Bound, TensorSpec

_SLAB_CPU, _SLAB = 1 << 18, 1 << 24


def find_fault(x: Tensor, decoded: Tensor, bound: Bound | None, *, nonzero: Tensor | None = None) -> str:
    """What is wrong with ``decoded``, or an empty string.

    With a bound: |decoded - x| <= bound for every finite x, and what is not finite comes back as it was. Without one:
    finite where x is. ``nonzero``, if given, has to be non-zero exactly where x is, and zeros have to decode to zeros.
    """
    for name, got, want in (
        ("shape", tuple(decoded.shape), tuple(x.shape)),
        ("dtype", decoded.dtype, x.dtype),
        ("strides", decoded.stride(), x.stride()),
    ):
        if got != want:
            return f"gate {name}: {got} came back for {want}"
    saved, seen = layout.memory_view(x), layout.memory_view(decoded)
    mask = None if nonzero is None else layout.memory_view(nonzero)
    for start, stop in _slabs(x):
        index = torch.arange(start, stop, device=x.device)
        fault = _find_in_values(saved[start:stop].double(), seen[start:stop].double(), _promised(x, bound, index))
        if not fault and mask is not None:
            fault = _find_in_zeros(saved[start:stop] == 0, seen[start:stop] == 0, mask[start:stop] == 0)
        if fault:
            return f"gate {fault} among elements {start} to {stop - 1} of {x.numel()}"
    return ""


def _find_in_values(saved: Tensor, seen: Tensor, promised: Tensor | None) -> str:
    if promised is None:
        lost = saved.isfinite() & ~seen.isfinite()
        return f"finite: {int(lost.sum())} finite values came back as NaN or inf" if bool(lost.any()) else ""
    error = (seen - saved).abs()
    same = (seen == saved) | (seen.isnan() & saved.isnan())
    wrong = ~same & ~(error <= promised)
    if not bool(wrong.any()):
        return ""
    worst = int(torch.where(wrong, error.nan_to_num(torch.inf), -1.0).argmax())
    off, allowed = float(error[worst]), float(promised[worst])
    return f"bound: {int(wrong.sum())} values are too far off, one by {off:.9g} where {allowed:.9g} is promised,"


def _find_in_zeros(was_zero: Tensor, is_zero: Tensor, said_zero: Tensor) -> str:
    moved, wrong = int((was_zero & ~is_zero).sum()), int((was_zero != said_zero).sum())
    if moved:
        return f"zeros: {moved} zeros came back as something else"
    return f"zeros: the mask of non-zeros is wrong {wrong} times" if wrong else ""


def _promised(x: Tensor, bound: Bound | None, index: Tensor) -> Tensor | None:
    if bound is None:
        return None
    value = bound.value.to(device=x.device, dtype=torch.float64).flatten()
    return value[layout.entries_at(layout.index_terms(TensorSpec.of(x), bound.axes), index)]


def _slabs(x: Tensor) -> Iterator[tuple[int, int]]:
    size = _SLAB_CPU if x.device.type == "cpu" else _SLAB
    for start in range(0, x.numel(), size):
        yield start, min(start + size, x.numel())
