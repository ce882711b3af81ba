"""How the inputs of each codec are made: a table with a default, so that a new codec file is covered without an entry.

Add a row to ``_VARIANTS`` only where float32 normals, with a bound of 0.05 if the codec takes one, are not what it
stores, or where its options have paths of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.codecs import Codec, create
from lowtide.codecs.sz import Sz
from lowtide.records import Bound, Encoded, TensorSpec
from lowtide.registry import CODECS

POOLED_PLANE = (64, 64)
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.complex64,
)


def bits(x: Tensor) -> Tensor:
    """The bytes of ``x`` in the order of its indices: equal bytes are equal NaNs and equal signs of zero."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8)


def bit_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def same_geometry(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def lay_out(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values with the axes in another order in memory, outermost first."""
    inverse = [order.index(axis) for axis in range(x.dim())]
    return x.permute(order).contiguous().permute(inverse)


@cache
def bound_of(step: float, dtype: torch.dtype = torch.float32, rounding: str = "nearest") -> float:
    """The smallest bound that leads ``sz`` to this step: half of it, and what roundings may take away."""
    spec = TensorSpec.of(torch.zeros(1, dtype=dtype))
    low, high = step / 2, step
    while (middle := (low + high) / 2) not in (low, high):
        reached = float(Sz(rounding=rounding).step(Bound.absolute(middle), spec)) >= step
        low, high = (low, middle) if reached else (middle, high)
    return high


def make_normals(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape)


def make_normals_with_nan(shape: tuple[int, ...]) -> Tensor:
    """Every seventh element is one that no code can carry."""
    x = torch.randn(shape)
    x.flatten()[3::7] = math.nan
    return x


def make_far_from_zero(shape: tuple[int, ...]) -> Tensor:
    """Between 1 and 6 or so: values of which a 255th of their range is less than an eighth."""
    return torch.randn(shape).abs() + 1


def make_levels(shape: tuple[int, ...]) -> Tensor:
    """Four levels, evenly spaced and all in use, that codes of 2, 4 and 8 bits hold exactly; the lowest is 1000."""
    x = 1000 + 85.0 * torch.randint(0, 4, shape)
    if x.numel() > 1:
        x.view(-1)[0], x.view(-1)[-1] = 1000, 1255
    return x


def make_flat_planes(shape: tuple[int, ...]) -> Tensor:
    """One small integer for each image (of four dimensions or more) or row: nothing is left of the mean of a block."""
    over = 2 if len(shape) >= 4 else 1
    sizes = [size if axis < len(shape) - over else 1 for axis, size in enumerate(shape)]
    return torch.randint(1, 100, sizes) + torch.zeros(shape)


def make_waves(shape: tuple[int, ...]) -> Tensor:
    """Values that differ little from the ones before them in memory."""
    return 3 * torch.sin(torch.arange(math.prod(shape)) / 20 + torch.rand(())).view(shape)


def make_half_zeros(shape: tuple[int, ...]) -> Tensor:
    return make_normals_with_nan(shape).relu()


def make_booleans(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) > 0


def make_indices(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 1 << 20, shape)


def make_wide_indices(shape: tuple[int, ...]) -> Tensor:
    """Beyond the reach of int32."""
    return torch.randint(1 << 40, 1 << 41, shape)


def make_pooled_indices(shape: tuple[int, ...]) -> Tensor:
    """Indices that 2x2 pooling of a plane of 64 x 64 could give; the last two sizes are at most 32."""
    if len(shape) < 2:
        return make_indices(shape)
    row = 2 * torch.arange(shape[-2]).unsqueeze(1) + torch.randint(0, 2, shape)
    column = 2 * torch.arange(shape[-1]) + torch.randint(0, 2, shape)
    return row * POOLED_PLANE[1] + column


@dataclass(frozen=True)
class Case:
    """One codec with one set of options, and inputs for it.

    ``elementwise`` codecs give an element the same value wherever it lies in memory; the others promise ``bound``, or
    have an error of at most ``error`` on these inputs.
    """

    name: str
    label: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[tuple[int, ...]], Tensor] = make_normals
    bound: float | None = 0.05
    elementwise: bool = False
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.label}"

    @property
    def limit(self) -> float | None:
        return self.bound if self.error is None else self.error

    def create(self) -> Codec:
        return create(self.name, **self.options)

    def encode(self, x: Tensor, *, seed: int = 11) -> Encoded:
        bound = None if self.bound is None else Bound.absolute(self.bound)
        return self.create().encode(x, bound, seed=seed)


_WINDOW = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "plane": POOLED_PLANE}
_SIGN = {"test": "sign", "values": (0.0, 1.0, -1.0, math.nan)}


def _elementwise(name: str, label: str, options: Mapping[str, Any], make: Callable[[tuple[int, ...]], Tensor]) -> Case:
    return Case(name, label, options, make, bound=None, elementwise=True)


_VARIANTS: dict[str, tuple[Case, ...]] = {
    "bitmask": (
        _elementwise("bitmask", "truth", {}, make_booleans),
        _elementwise("bitmask", "not_le", {"test": "not_le", "params": (0.0,)}, make_normals),
        _elementwise("bitmask", "sign", _SIGN, make_normals_with_nan),
    ),
    "cast": (
        _elementwise("cast", "bf16", {}, make_normals_with_nan),
        _elementwise("cast", "fp8_e4m3", {"to": "fp8_e4m3"}, make_normals_with_nan),
        _elementwise("cast", "fp8_e5m2", {"to": "fp8_e5m2"}, make_normals),
    ),
    "cusz": (
        Case("cusz", "nearest", {}, make_normals_with_nan, elementwise=True),
        Case("cusz", "dither", {"rounding": "dither", "prediction": "lorenzo"}),
        Case("cusz", "unpredicted", {"prediction": "none"}, make_half_zeros, elementwise=True),
        Case("cusz", "raw", bound=1e-12, elementwise=True),
    ),
    # Payloads do not depend on strides, so that elements have the same dither wherever they lie.
    "division": (
        _elementwise("division", "default", {}, make_flat_planes),
        _elementwise("division", "8_bits", {"bits": 8}, make_far_from_zero),
        _elementwise("division", "nearest", {"bits": 8, "rounding": "nearest"}, make_far_from_zero),
        _elementwise("division", "faithful", {"bits": 8, "faithful": True}, make_far_from_zero),
    ),
    # Elementwise within one group, if rounding is to the nearest or has nothing to do.
    "groups": (
        _elementwise("groups", "default", {}, make_levels),
        _elementwise("groups", "8_bits", {"bits": 8}, make_levels),
        _elementwise("groups", "nearest", {"bits": 8, "rounding": "nearest"}, make_far_from_zero),
    ),
    "identity": (_elementwise("identity", "default", {}, make_normals_with_nan),),
    "jpeg_act": (
        _elementwise("jpeg_act", "dither", {}, make_far_from_zero),
        _elementwise("jpeg_act", "nearest", {"rounding": "nearest", "table": "optL"}, make_far_from_zero),
        Case("jpeg_act", "faithful", {"faithful": True}, make_normals_with_nan, None, error=0.8),
    ),
    "lossless": (
        _elementwise("lossless", "default", {}, make_normals_with_nan),
        _elementwise("lossless", "zeros", {}, make_half_zeros),
    ),
    # Groups depend on the order of memory.
    "norm_groups": (
        Case("norm_groups", "default", {"bits": 8}, bound=None, error=0.1),
        Case("norm_groups", "row", {"bits": 8, "per": "row"}, bound=None, error=0.1),
        Case("norm_groups", "plain", {"bits": 6, "per": "tensor"}, bound=None, error=0.8),
    ),
    "sample_groups": (
        Case("sample_groups", "default", {"bits": 6}, bound=None, error=0.8),
        Case("sample_groups", "one_width", {"bits": 8}, bound=None, error=0.1),
    ),
    # Without poison the values of the stand-in are whatever the memory held: nothing to compare.
    "shape": (_elementwise("shape", "poison", {"poison": True}, make_normals),),
    "sz": (
        Case("sz", "dither"),
        Case("sz", "nearest", {"rounding": "nearest"}, make_normals_with_nan, elementwise=True),
        Case("sz", "keep_zeros", {"keep_zeros": True}, make_half_zeros),
        Case("sz", "stochastic", {"rounding": "stochastic"}),
        Case("sz", "raw", bound=1e-12),
        Case("sz", "rans", {"coder": "rans"}, make_normals, bound=0.5),
        Case("sz", "rans_predicted", {"coder": "rans", "predict": "row"}, make_waves, bound=0.25),
        Case("sz", "rans_keep_zeros", {"coder": "rans", "keep_zeros": True}, make_half_zeros, bound=0.5),
    ),
    "window_index": (
        _elementwise("window_index", "plane", {}, make_indices),
        _elementwise("window_index", "wide", {}, make_wide_indices),
        _elementwise("window_index", "pooled", _WINDOW, make_pooled_indices),
    ),
}


def _default(name: str) -> Case:
    return Case(name) if CODECS.load(name).takes_bound else Case(name, bound=None, error=1.0)


CASES = tuple(case for name in CODECS.names() for case in _VARIANTS.get(name) or (_default(name),))
