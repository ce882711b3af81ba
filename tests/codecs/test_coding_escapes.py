"""Values stored apart: bit for bit, and refused where they contradict the tensor they belong to."""

from __future__ import annotations

import math

import pytest
import torch
from codec_cases import bit_equal
from torch import Tensor

from lowtide.coding import escapes
from lowtide.errors import PayloadError
from lowtide.records import Encoded, TensorSpec


def payload(like: Tensor, parts: dict[str, Tensor]) -> Encoded:
    return Encoded("cast", 1, TensorSpec.of(like), {}, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_marked_values_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.randn(500).to(dtype)
    x[[0, 7, 499]] = torch.tensor([math.nan, -math.inf, -0.0], dtype=dtype)
    where = torch.rand(500) < 0.1
    where[[0, 7, 499]] = True
    parts = escapes.gather(x, where)
    assert parts["escape_index"].tolist() == where.nonzero().flatten().tolist()
    assert [part.dtype for part in parts.values()] == [torch.int64, dtype]
    flat = torch.full((500,), 9.0, dtype=dtype)
    escapes.scatter(flat, payload(x, parts))
    assert bit_equal(flat, torch.where(where, x, 9.0))


def test_no_escapes_are_two_parts_without_elements() -> None:
    """So that a lost part is noticed, and cost no bytes."""
    x = torch.randn(10)
    parts = escapes.gather(x, torch.zeros(10, dtype=torch.bool))
    assert {name: (part.numel(), part.dtype) for name, part in parts.items()} == {
        "escape_index": (0, torch.int64),
        "escape_value": (0, torch.float32),
    }
    assert payload(x, parts).nbytes == 0
    before = x.clone()
    escapes.scatter(x, payload(x, parts))
    assert bit_equal(x, before)


@pytest.mark.parametrize("part", ["escape_index", "escape_value"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_missing_part_is_refused(part: str, count: int) -> None:
    flat = torch.zeros(10)
    parts = escapes.gather(flat, torch.arange(10) < count)
    del parts[part]
    with pytest.raises(PayloadError, match=rf"cast payload for shape \(10,\) lacks its part '{part}'"):
        escapes.scatter(flat, payload(flat, parts))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (torch.tensor([1, 2]), torch.ones(1), r"'escape_value' is 1 x torch.float32, expected 2 x torch.float32"),
        (
            torch.tensor([1, 2]),
            torch.ones(2).half(),
            r"'escape_value' is 2 x torch.float16, expected 2 x torch.float32",
        ),
        (
            torch.tensor([1, 2]).int(),
            torch.ones(2),
            r"'escape_index' is 2 x torch.int32, expected any .* x torch.int64",
        ),
        (
            torch.tensor([1.0, 2.0]),
            torch.ones(2),
            r"'escape_index' is 2 x torch.float32, expected any .* x torch.int64",
        ),
        (torch.tensor([1, 10]), torch.ones(2), "an escape lies outside the tensor"),
        (torch.tensor([-1, 1]), torch.ones(2), "an escape lies outside the tensor"),
    ],
    ids=["too_few", "other_dtype", "narrow_positions", "float_positions", "beyond", "negative"],
)
def test_damaged_parts_are_refused_and_nothing_is_written(index: Tensor, value: Tensor, message: str) -> None:
    flat = torch.zeros(10)
    with pytest.raises(PayloadError, match=f"cast payload: .*{message}.*: .*corrupted"):
        escapes.scatter(flat, payload(flat, {"escape_index": index, "escape_value": value}))
    assert torch.equal(flat, torch.zeros(10))


def test_no_escape_fits_into_nothing() -> None:
    parts = {"escape_index": torch.tensor([0]), "escape_value": torch.ones(1)}
    with pytest.raises(PayloadError, match="an escape lies outside the tensor"):
        escapes.scatter(torch.zeros(0), payload(torch.zeros(0), parts))
