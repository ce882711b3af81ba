"""Store the values in a narrower float type: the plain baseline, with no error bound of its own choosing.

Values that the target cannot hold are rare, and one number tells whether there are any: the largest magnitude. So a
tensor is cast as if there were none, in two or three passes, and the device says later whether that was so; only if it
was not are they looked for. Nobody waits for the answer: until it is there the payload is provisional.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import escapes, layout
from lowtide.errors import DtypeError, UnknownNameError
from lowtide.records import Bound, Encoded

__all__ = ["Cast"]

_TARGETS = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# To make a power of two from its bits: the integer as wide, the exponent's bias, the bits of the significand.
_POWERS = {torch.float32: (torch.int32, 127, 23), torch.float64: (torch.int64, 1023, 52)}


@dataclass(frozen=True, slots=True)
class Cast:
    """|x' - x| <= |x| * 2**-8 for bf16, 2**-4 (e4m3) and 2**-3 (e5m2) of |x| for fp8, in the target's normal range.

    fp8 is scaled by a power of two that puts the largest finite magnitude just below the format's largest value; below
    the normal range the error is at most half the smallest step. NaN, inf and values that the target would turn into
    them are stored apart and restored bit for bit; zeros stay zeros. A dtype not wider than the target is refused.

    With a ``ticket`` (one int64 in memory that host and device share) ``encode`` waits for nothing: the device stores 1
    there if something has to be stored apart and 0 if not, and ``settle`` makes the payload final once that is known.
    """

    to: str = "bf16"

    name: ClassVar[str] = "cast"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False
    ticketed: ClassVar[bool] = True
    replays: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.to not in _TARGETS:
            raise UnknownNameError("cast target", self.to, _TARGETS)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize > _TARGETS[self.to].itemsize

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, ticket: Tensor | None = None) -> Encoded:
        if not self.accepts(x.dtype):
            raise DtypeError(f"cast to {self.to} takes wider floating point tensors, got {x.dtype}")
        flat = layout.memory_view(x)
        narrow, exponent, lost = _narrow(flat, _TARGETS[self.to])
        encoded = self._payload(x, narrow, exponent, escapes.none(flat))
        if ticket is None:
            return self.settle(encoded, x, int(lost))
        ticket.copy_(lost, non_blocking=True)
        return encoded

    def settle(self, encoded: Encoded, x: Tensor, status: int, plan: object = None) -> Encoded:
        """``encoded`` if nothing has to be stored apart, else ``x`` encoded anew; ``status`` is the device's word."""
        return encoded if status == 0 else self._encode_apart(x)

    def _encode_apart(self, x: Tensor) -> Encoded:
        """With a look at every value, in float64 where there is a scale: the specification of the fast way."""
        target, flat = _TARGETS[self.to], layout.memory_view(x)
        if target.itemsize == 2:
            narrow, exponent = flat.to(target), _no_scale(flat)
        else:
            finite = torch.where(flat.isfinite(), flat, 0).double()
            exponent = _exponent(_peak(finite), target)
            narrow = torch.ldexp(finite, -exponent).float().to(target)
        lost = ~flat.isfinite() | ~_widen(narrow, exponent, x.dtype).isfinite()
        return self._payload(x, narrow, exponent, escapes.gather(flat, lost))

    def _payload(self, x: Tensor, narrow: Tensor, exponent: Tensor, apart: dict[str, Tensor]) -> Encoded:
        tensors = {"values": narrow, "exponent": exponent, **apart}
        return Encoded(self.name, self.version, layout.spec_of(x), {"to": self.to}, tensors)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec = encoded.spec
        narrow = encoded.tensor("values", dtype=_TARGETS[encoded.meta["to"]], numel=spec.numel)
        exponent = encoded.tensor("exponent", dtype=torch.int32, numel=1)
        if narrow.dtype.itemsize == 1:
            every = _widen(_codes(narrow.dtype, spec.device), exponent, spec.dtype)
            flat = every.index_select(0, narrow.view(torch.uint8).int())
        else:
            flat = narrow.to(spec.dtype)
        escapes.scatter(flat, encoded)
        return layout.restore(flat, spec)


def _narrow(flat: Tensor, target: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values in the target, the exponent of their scale, and 1 if any of them has to be stored apart, else 0."""
    if target.itemsize == 2:
        narrow = flat.to(target)
        return narrow, _no_scale(flat), _is_infinite(_peak(narrow)).long()
    work = torch.float64 if flat.dtype == torch.float64 else torch.float32
    integer, bias, digits = _POWERS[work]
    peak = _peak(flat)
    exponent = _exponent(peak, target)
    # A product with a power of two is exact, but where it is far below the target's smallest step.
    scale = ((bias - exponent).clamp(1, 2 * bias).to(integer) << digits).view(work)
    narrow = (flat * scale).float().to(target)
    widest = _widen((peak * scale).float().to(target), exponent, flat.dtype)
    lost = _is_infinite(torch.maximum(widest, peak)) | (exponent < -bias)
    return narrow, exponent, lost.long()


def _peak(flat: Tensor) -> Tensor:
    """The largest magnitude, in a single pass; NaN where there is one."""
    if not flat.numel():
        return flat.new_zeros(1)
    return torch.linalg.vector_norm(flat, torch.inf).reshape(1)


def _is_infinite(peak: Tensor) -> Tensor:
    return peak - peak != 0  # NaN - NaN and inf - inf are NaN, which differs from all


def _no_scale(flat: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=flat.device)


def _widen(narrow: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    if narrow.dtype.itemsize == 2:
        return narrow.to(dtype)
    return torch.ldexp(narrow.double(), exponent).to(dtype)


def _codes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Each of the 256 values of an fp8 type, in the order of their bits."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype)


def _exponent(peak: Tensor, target: torch.dtype) -> Tensor:
    """The power of two to divide by, so that the largest magnitude stays below the target's largest value."""
    room = math.frexp(torch.finfo(target).max)[1] - 1
    return torch.frexp(peak.double()).exponent - room
