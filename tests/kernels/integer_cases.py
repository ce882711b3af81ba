"""What the twins of ``cusz``, ``jpeg_act`` and ``lossless`` are tried on, emulated and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from same_payload import assert_same_payload, assert_same_values, bits, copy_to
from torch import Tensor

from lowtide import codecs, kernels
from lowtide.records import Bound, Encoded
from lowtide.registry import KERNELS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OTHERS = {"fp64": torch.float64, "fp8": torch.float8_e5m2}  # of ``lossless``
CODECS = ("cusz", "jpeg_act", "lossless")


@dataclass(frozen=True, eq=False)
class Case:
    """One tensor, the codec and how it is coded."""

    name: str
    codec: str
    x: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    bound: Bound | None = None
    seed: int = 77

    def __str__(self) -> str:
        return f"{self.codec} {self.options}, {self.name}: {self.x.dtype} {tuple(self.x.shape)} {self.x.stride()}"


def with_specials(x: Tensor) -> Tensor:
    """NaN, both infinities, both zeros, the smallest and the largest number; a NaN with a payload."""
    x, info = x.clone(), torch.finfo(x.dtype)
    flat = x.as_strided((x.numel(),), (1,))
    for place, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 0.0, info.tiny, -info.max)):
        flat[place * (x.numel() // 7)] = value
    return x


def maps(dtype: torch.dtype, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """With whole and with short transforms, with none; in both layouts."""
    for shape in ((2, 3, 16, 24), (1, 3, 14, 9), (1, 2, 11, 40), (2, 33, 7, 7)):
        x = torch.randn(shape, generator=random)
        yield "maps", x.to(dtype)
        yield "behind a ReLU, channels_last", channels_last(with_specials(x.relu().to(dtype)))
    smooth = torch.cumsum(torch.cumsum(torch.randn(2, 5, 12, 20, generator=random), 2), 3) / 8
    yield "smooth", with_specials(smooth.to(dtype))
    yield "smooth, channels_last", channels_last(smooth.to(dtype))
    yield "five dimensions", torch.randn(2, 3, 2, 17, 10, generator=random).to(dtype)
    yield "an odd start", torch.randn(2 * 9 * 9 * 3 + 1, generator=random).to(dtype)[1:].view(2, 3, 9, 9)


def rows(dtype: torch.dtype, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Lengths around groups and chunks, every size of a value, and nothing at all."""
    for shape in ((1,), (3,), (1023,), (1025,), (33, 100), (5, 7, 64), (4, 1), (2, 5, 1, 30)):
        yield "rows", torch.randn(shape, generator=random).to(dtype)
    yield "transposed", torch.randn(60, 90, generator=random).to(dtype).t()
    yield "zeros", torch.zeros(3, 2, 9, 9).to(dtype)
    yield "one that is not zero", torch.nn.functional.pad(torch.ones(1), (700, 600)).to(dtype)
    yield "none", torch.zeros(0, 3).to(dtype)
    wide = torch.randn(40, 100, generator=random) * torch.logspace(-6, 4, 40).unsqueeze(1)
    yield "all sizes", with_specials(wide.to(dtype))


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def make_cases(codec: str, dtype: torch.dtype) -> Iterator[Case]:
    """All cases of a codec and a dtype, on the CPU; the same every time."""
    random = torch.Generator().manual_seed(dtype.itemsize)
    for name, x in (*maps(dtype, random), *rows(dtype, random)):
        yield from _OPTIONS[codec](name, x)


def _cusz(name: str, x: Tensor) -> Iterator[Case]:
    yield Case(name, "cusz", x, {}, Bound.absolute(0.05))
    yield Case(name, "cusz", x, {"rounding": "dither", "prediction": "lorenzo"}, Bound.absolute(0.3))
    if x.dim() < 4:
        yield Case(name, "cusz", x, {"prediction": "none"}, Bound.absolute(2e-3))
    elif x.numel() < 1000:
        for axes in ((1,), (0,), (0, 1)):
            value = torch.rand([x.shape[axis] for axis in axes], generator=torch.Generator().manual_seed(5)).double()
            value.view(-1)[0] = 0  # nothing can be promised there
            yield Case(name, "cusz", x, {"rounding": "dither"}, Bound(value, axes))


def _jpeg_act(name: str, x: Tensor) -> Iterator[Case]:
    yield Case(name, "jpeg_act", x)
    if x.numel() < 1000:
        yield Case(name, "jpeg_act", x, {"rounding": "nearest", "table": "optL"})
        yield Case(name, "jpeg_act", x, {"faithful": True})


def _lossless(name: str, x: Tensor) -> Iterator[Case]:
    yield Case(name, "lossless", x)


_OPTIONS = {"cusz": _cusz, "jpeg_act": _jpeg_act, "lossless": _lossless}


def check(case: Case, device: torch.device, *, against_cpu: bool = False) -> Encoded:
    """The twin writes what the codec writes, each reads what the other wrote; gives the payload."""
    x = copy_to(case.x, device)
    codec = codecs.create(case.codec, **case.options)
    twin: Any = KERNELS.load(case.codec)(codec) if device.type == "cpu" else kernels.twin(codec, device, x.dtype)
    assert twin is not codec, f"{case}: there is no twin at work"
    before = bits(x)
    expected = codec.encode(x, case.bound, seed=case.seed)
    got = twin.encode(x, case.bound, seed=case.seed)
    assert torch.equal(bits(x), before), f"{case}: encode changed its input"
    assert_same_payload(got, expected, str(case))
    if against_cpu:
        there = codec.encode(copy_to(case.x, torch.device("cpu")), case.bound, seed=case.seed)
        assert_same_payload(got, there, f"{case}, on the CPU")
    plain = codec.decode(expected)
    for reader, payload in ((twin, expected), (twin, got), (codec, got)):
        assert_same_values(reader.decode(payload), plain, f"{case}, decode of {type(reader).__name__}")
    if hasattr(codec, "nonzero"):
        nonzero = codec.nonzero(expected).as_strided(x.shape, x.stride())  # of an axis of one value any stride is right
        assert_same_values(twin.nonzero(got), nonzero, f"{case}, nonzero")
    return got
