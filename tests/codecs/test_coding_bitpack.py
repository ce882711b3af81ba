"""Codes of 1, 2, 4 and 8 bits into bytes: every width, every count around a byte's worth, the bits by hand."""

from __future__ import annotations

import pytest
import torch

from lowtide.coding import bitpack


@pytest.mark.parametrize("width", bitpack.WIDTHS)
def test_every_count_round_trips_in_the_bytes_it_needs(width: int) -> None:
    for count in [*range(34), 1000, 1023]:
        codes = torch.randint(0, 1 << width, (count,), dtype=torch.uint8)
        kept = codes.clone()
        packed = bitpack.pack(codes, width)
        assert packed.dtype == torch.uint8
        assert packed.numel() == bitpack.packed_nbytes(count, width) == (count * width + 7) // 8
        assert torch.equal(bitpack.unpack(packed, width, count), codes)
        assert torch.equal(codes, kept)


@pytest.mark.parametrize("width", bitpack.WIDTHS)
def test_every_code_survives_in_every_place_of_a_byte(width: int) -> None:
    per_byte = 8 // width
    for place in range(per_byte):
        codes = torch.zeros((1 << width, per_byte), dtype=torch.uint8)
        codes[:, place] = torch.arange(1 << width, dtype=torch.uint8)
        packed = bitpack.pack(codes.flatten(), width)
        assert packed.tolist() == [code << (width * place) for code in range(1 << width)]
        assert torch.equal(bitpack.unpack(packed, width, codes.numel()), codes.flatten())


@pytest.mark.parametrize(
    ("width", "codes", "packed"),
    [
        (1, [1, 0, 1, 1, 0, 0, 0, 1, 1], [0b10001101, 0b1]),
        (2, [3, 0, 1, 2, 2], [0b10010011, 0b10]),
        (4, [0x1, 0xF, 0xA], [0xF1, 0x0A]),
        (8, [7, 255], [7, 255]),
    ],
)
def test_lowest_bits_come_first_and_the_rest_is_zero(width: int, codes: list[int], packed: list[int]) -> None:
    assert bitpack.pack(torch.tensor(codes, dtype=torch.uint8), width).tolist() == packed


def test_packing_eight_bits_copies() -> None:
    codes = torch.tensor([1, 2, 3], dtype=torch.uint8)
    packed = bitpack.pack(codes, 8)
    unpacked = bitpack.unpack(packed, 8, 2)
    codes.zero_()
    packed.add_(10)
    assert (packed.tolist(), unpacked.tolist()) == ([11, 12, 13], [1, 2])


def test_width_for_is_the_narrowest_that_tells_the_classes_apart() -> None:
    expected = {1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 9: 4, 16: 4, 17: 8, 256: 8, 257: 0, 10**6: 0}
    assert {classes: bitpack.width_for(classes) for classes in expected} == expected
