"""Memory order: a dense tensor is coded in the order its elements lie in memory, whatever its strides."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lowtide.errors import LayoutError
from lowtide.records import TensorSpec


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill a stretch of memory with no gap and no overlap, in some order of the axes."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether elements lie in the order of their axes, the last one fastest."""
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def spec_of(x: Tensor) -> TensorSpec:
    """The spec of a dense tensor; anything else is refused."""
    if not is_dense(tuple(x.shape), tuple(x.stride())):
        raise LayoutError(
            f"tensor of shape {tuple(x.shape)} and strides {tuple(x.stride())} overlaps or has gaps; "
            "code x.clone() (which packs it) or keep it"
        )
    return TensorSpec.of(x)


def memory_view(x: Tensor) -> Tensor:
    """The elements of a dense tensor as one row, in memory order, without a copy."""
    spec_of(x)
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def dense_spec(x: Tensor) -> TensorSpec:
    """The spec of ``x`` packed: its own strides if it is dense, else dense strides in the same order of axes."""
    if is_dense(tuple(x.shape), tuple(x.stride())):
        return TensorSpec.of(x)
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_stride(shape, tuple(x.stride())), x.dtype, x.device)


@lru_cache(maxsize=4096)
def dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a view with gaps once it is packed: those of its clone, its axes in the same order."""
    return tuple(torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride())


def restore(flat: Tensor, spec: TensorSpec) -> Tensor:
    """A row in memory order back to the shape and strides it had."""
    return flat.as_strided(spec.shape, spec.stride, 0)


def index_terms(spec: TensorSpec, axes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """How element i in memory order finds its entry in a table over ``axes``.

    Terms (divide, modulo, times): entry = sum of ((i // divide) % modulo) * times. In a dense layout the coordinate
    along an axis is (i // stride) % size, and the table is contiguous over ``axes``.
    """
    terms: list[tuple[int, int, int]] = []
    times = 1
    for axis in reversed(axes):
        size, stride = spec.shape[axis], spec.stride[axis]
        if size == 1:
            continue
        if terms and stride == terms[-1][0] * terms[-1][1]:  # neighbours in memory too: the two count as one axis
            inner = terms.pop()
            terms.append((inner[0], inner[1] * size, inner[2]))
        else:
            terms.append((stride, size, times))
        times *= size
    return tuple(reversed(terms))


def spread(table: Tensor, term: tuple[int, int, int], start: int, stop: int) -> Tensor:
    """``table[entries]`` for the elements [start, stop) and a single term that counts by one, in runs."""
    divide, modulo, _ = term
    if divide == 1:
        laps = -(-stop // modulo) - start // modulo
        row, skip = table.expand(laps, modulo).flatten(), start % modulo
    else:
        runs = torch.arange(start // divide, -(-stop // divide), device=table.device) % modulo
        row, skip = table[runs].unsqueeze(1).expand(-1, divide).flatten(), start % divide
    return row[skip : skip + stop - start]


def entries_at(terms: tuple[tuple[int, int, int], ...], index: Tensor) -> Tensor:
    """Table entry of the elements at ``index`` in memory order."""
    if not terms:
        return torch.zeros_like(index)
    parts = []
    for divide, modulo, times in terms:  # as few launches as can be: a single term that counts by one is the rule
        part = (index if divide == 1 else index // divide) % modulo
        parts.append(part if times == 1 else part.mul_(times))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
