"""lossless: every bit of every float type, zeros for a bit, and no more than the values themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from codec_cases import bit_equal, same_geometry
from torch import Tensor

from lowtide.codecs.lossless import Lossless
from lowtide.errors import PayloadError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
MANY = 70_000  # of which half is enough for rans


def every_bit_pattern(dtype: torch.dtype, count: int = 3001) -> Tensor:
    """Random bytes seen as ``dtype``: NaN payloads, subnormals, both zeros."""
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("coder", ["blocks", "rans"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_comes_back(dtype: torch.dtype, coder: str) -> None:
    codec = Lossless(coder)
    for values in (torch.randn(MANY), torch.randn(MANY).relu(), torch.zeros(1000), -torch.zeros(1000)):
        x = values.to(dtype)
        assert bit_equal(codec.decode(codec.encode(x)), x)
    x = every_bit_pattern(dtype)
    assert bit_equal(codec.decode(codec.encode(x)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_noise_is_no_larger_than_it_was(dtype: torch.dtype) -> None:
    x = every_bit_pattern(dtype)
    assert Lossless().encode(x).nbytes <= x.nbytes


def test_signed_zeros_are_not_zeros() -> None:
    x = torch.zeros(200)
    x[::2] = -0.0
    encoded = Lossless().encode(x)
    assert encoded.meta["stored"] == 100 and bit_equal(Lossless().decode(encoded), x)


def test_a_bitmap_is_worth_it_from_one_zero_in_64_on() -> None:
    for zeros, has_bitmap in ((0, False), (15, False), (16, True), (1024, True)):
        x = torch.rand(1024) + 1
        x[:zeros] = 0
        encoded = Lossless().encode(x)
        assert (encoded.meta["bitmap"], encoded.meta["stored"]) == (has_bitmap, 1024 - zeros * has_bitmap)


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 27.5), (torch.bfloat16, 11.5), (torch.float16, 14.2)], ids=str
)
def test_exponents_of_normal_values_are_worth_coding(dtype: torch.dtype, largest: float) -> None:
    """Bits a value by rans; the mantissa is noise and is stored as it is."""
    x = torch.randn(MANY).to(dtype)
    encoded = Lossless("rans").encode(x)
    assert 8 * encoded.nbytes / x.numel() < largest
    kinds = [plane["coder"] for plane in encoded.meta["planes"]]
    assert kinds == ["rans"] + ["raw"] * (dtype.itemsize - 1)
    assert Lossless("blocks").encode(x).nbytes < x.nbytes


def test_what_was_widened_costs_what_it_was() -> None:
    """bfloat16 values held as float32: the two lowest bytes are always zero."""
    narrow = torch.randn(MANY).to(torch.bfloat16)
    wide = Lossless("rans").encode(narrow.float())
    assert wide.nbytes < 1.1 * Lossless("rans").encode(narrow).nbytes


def test_nonzero_is_what_relu_asks() -> None:
    x = torch.randn(500).relu()
    x[3], x[4], x[5] = float("nan"), -0.0, 1e-40
    encoded = Lossless(keep_zeros=True).encode(x)
    answer = Lossless().nonzero(encoded)
    assert same_geometry(answer, x) and torch.equal(answer, (x != 0).float())
    assert Lossless().encode(x).to_bytes() == encoded.to_bytes()


def test_planes_that_do_not_fit_the_dtype_are_refused() -> None:
    encoded = Lossless().encode(torch.randn(10))
    planes = encoded.meta["planes"][:-1]
    with pytest.raises(PayloadError, match="lossless payload: 3 byte planes for 4 bytes: corrupted"):
        Lossless().decode(dataclasses.replace(encoded, meta={**encoded.meta, "planes": planes}))
