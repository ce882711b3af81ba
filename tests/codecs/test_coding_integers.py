"""Integers through the entropy stage: every one comes back, whatever its size, and small ones cost little."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.coding import integers
from lowtide.errors import PayloadError, UnknownNameError
from lowtide.records import Encoded, TensorSpec

MANY = 40_000  # enough for rans


def round_trip(codes: Tensor, coder: str, prefix: str = "") -> tuple[Tensor, Encoded]:
    meta, parts = integers.write(codes, coder, prefix)
    encoded = Encoded("test", 1, TensorSpec.of(codes), meta, parts)
    assert all(name.startswith(prefix) for name in parts)
    return integers.read(encoded, meta, codes.numel(), prefix), encoded


@pytest.mark.parametrize("coder", integers.CODERS)
@pytest.mark.parametrize("count", [0, 1, 31, 1023, 1025, MANY])
@pytest.mark.parametrize("scale", [0, 1, 40, 900, 20_000])
def test_every_integer_comes_back(coder: str, count: int, scale: int) -> None:
    """Up to the ends of int16: beyond 2047 an integer is an escape, and chunks of such are stored as they are."""
    codes = (torch.randn(count) * scale).clamp(-(1 << 15), (1 << 15) - 1).to(torch.int16)
    if count:
        codes[0], codes[-1] = -(1 << 15), (1 << 15) - 1
        codes[count // 2], codes[count // 3] = 4096, 2047  # the former means "exactly zero" to the coders of sz
    found, encoded = round_trip(codes, coder, "some_")
    assert torch.equal(found, codes)
    assert encoded.nbytes <= 2 * count + count // 32 + 40


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(1 << 15), (1 << 15) - 1), max_size=200), st.sampled_from(integers.CODERS))
def test_any_integers(values: list[int], coder: str) -> None:
    codes = torch.tensor(values, dtype=torch.int16)
    assert torch.equal(round_trip(codes, coder)[0], codes)


def test_rans_is_near_the_entropy_and_serves_large_inputs_only() -> None:
    codes = (torch.randn(200_000) * 2).round().to(torch.int16)
    share = torch.bincount((codes + 20).int()).double() / codes.numel()
    entropy = float(torch.special.entr(share).sum()) / 0.6931
    size = {coder: 8 * round_trip(codes, coder)[1].nbytes / codes.numel() for coder in integers.CODERS}
    assert entropy <= size["rans"] <= 1.1 * entropy < size["blocks"]
    assert integers.write(codes[:1000], "rans")[0]["coder"] == "blocks"


def test_a_coder_that_rans_has_no_alphabet_for_is_blocks() -> None:
    codes = torch.randint(-(1 << 15), 1 << 15, (MANY,)).to(torch.int16)
    assert integers.write(codes, "rans")[0]["coder"] == "blocks"


@pytest.mark.parametrize("meta", [{"coder": "huffman"}, {}, {"coder": "none"}])
def test_a_payload_by_no_coder_is_refused(meta: dict[str, Any]) -> None:
    encoded = round_trip(torch.ones(50, dtype=torch.int16), "blocks")[1]
    with pytest.raises(PayloadError, match=r"test payload: 50 integers by coder .*: corrupted"):
        integers.read(encoded, meta, 50)


@pytest.mark.parametrize("coder", integers.CODERS)
def test_words_of_another_number_are_refused(coder: str) -> None:
    encoded = round_trip((torch.randn(MANY) * 3).to(torch.int16), coder)[1]
    longer = torch.cat([encoded.tensors["words"], torch.zeros(1, dtype=torch.int32)])
    for words in (longer, encoded.tensors["words"][:-1]):
        damaged = dataclasses.replace(encoded, tensors={**encoded.tensors, "words": words})
        with pytest.raises(PayloadError, match="corrupted"):
            integers.read(damaged, dict(encoded.meta), MANY)


def test_an_unknown_coder_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown coder 'block'; known: blocks, rans\. Did you mean 'blocks'"):
        integers.require_coder("block")
