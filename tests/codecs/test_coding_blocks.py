"""The coder ``blocks`` against its format written out in plain Python, and what it costs to the word."""

from __future__ import annotations

import blocks_format
import pytest
import torch
from blocks_format import PLACES, bits_of, element_at
from codec_cases import bit_equal
from torch import Tensor

from lowtide.coding import blocks, exact
from lowtide.errors import PayloadError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COUNTS = [0, 1, 31, 32, 33, 1023, 1024, 1025, 3000]
NAMES = ("headers", "offsets", "words")
WHOLE = {torch.float16: 512, torch.bfloat16: 512, torch.float32: 1024, torch.float64: 2048}  # words of a raw chunk


def encode(codes: Tensor, lost: Tensor | None = None, values: Tensor | None = None) -> dict[str, Tensor]:
    """Signed codes as a payload; float32 values that are never looked at unless some are given."""
    lost = torch.zeros(codes.numel(), dtype=torch.bool) if lost is None else lost
    values = torch.zeros(codes.numel()) if values is None else values
    return blocks.join([blocks.write(codes.abs(), codes < 0, lost, values)])


def reader(parts: dict[str, Tensor], count: int, dtype: torch.dtype = torch.float32) -> blocks.Reader:
    return blocks.Reader(*(parts[name] for name in NAMES), dtype=dtype, count=count)


def read(parts: dict[str, Tensor], count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """All codes, signed."""
    codes, negative = reader(parts, count, dtype).read(0, count)
    assert (codes.dtype, negative.dtype) == (torch.int32, torch.bool)
    return torch.where(negative, -codes, codes)


def draw_bits(count: int, dtype: torch.dtype) -> Tensor:
    """Random bytes: every kind of NaN, subnormals, both zeros."""
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def draw_codes(count: int, *, signed: bool) -> Tensor:
    """Blocks of every width, a third of the codes negative where ``signed``."""
    element = torch.arange(count)
    block = element // 1024 * 32 + element % 128 // 4
    room = 2.0 ** torch.randint(0, 12, (-(-count // 1024) * 32,))[block]
    codes = (torch.rand(count) * room).int()
    return torch.where((torch.rand(count) < 0.3) & signed, -codes, codes)


def draw(count: int, dtype: torch.dtype, *, signed: bool, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, a ``share`` of them lost, and values of which only those that are lost should be looked at."""
    lost = torch.rand(count) < share
    return draw_codes(count, signed=signed).masked_fill(lost, 0), lost, draw_bits(count, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize("count", COUNTS)
def test_bytes_are_those_of_the_format_and_read_back(
    count: int, signed: bool, share: float, dtype: torch.dtype
) -> None:
    """A share of 0.5 makes raw chunks of most, 0.05 escapes of every size; 3000 values end in a short chunk."""
    codes, lost, values = draw(count, dtype, signed=signed, share=share)
    kept = [part.clone() for part in (codes, lost, values)]
    parts = encode(codes, lost, values)
    assert all(bit_equal(part, before) for part, before in zip((codes, lost, values), kept, strict=True))
    nbits = 8 * dtype.itemsize
    expected = blocks_format.write(codes.tolist(), lost.tolist(), bits_of(values), nbits=nbits)
    assert blocks_format.Parts(*(parts[name].tolist() for name in NAMES)) == expected
    assert [parts[name].dtype for name in NAMES] == [torch.uint8, torch.int32, torch.int32]

    content = blocks_format.read(expected, count=count, nbits=nbits)
    assert read(parts, count, dtype).tolist() == content.codes
    stored = content.escapes | content.raw
    assert list(content.escapes) == [at for at in lost.nonzero().flatten().tolist() if at not in content.raw]
    flat = torch.full((count,), 9.0, dtype=dtype)
    nine = bits_of(torch.full((1,), 9.0, dtype=dtype))[0]
    reader(parts, count, dtype).write_exact(flat)
    assert bits_of(flat) == [stored.get(at, nine) for at in range(count)]
    assert all(stored[at] == value for at, value in enumerate(bits_of(values)) if at in stored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_coded_raw_and_short_chunks_lie_side_by_side(dtype: torch.dtype) -> None:
    """Chunk 1 of four is lost altogether, the last one has 7 values, which lie in two blocks; none of it moves what the
    others hold."""
    codes, lost, values = draw(3 * 1024 + 7, dtype, signed=True, share=0.02)
    codes[3072:] = torch.tensor([0, 1, 0, 0, 1, 0, 1])
    codes[1024:2048], lost[1024:2048], lost[3072:] = 0, True, False
    parts = encode(codes, lost, values)
    lengths = parts["offsets"].diff().tolist()
    assert (lengths[1], lengths[3]) == (WHOLE[dtype], 2)
    assert parts["headers"][16:32].tolist() == [8] + [0] * 15
    flat = torch.zeros(codes.numel(), dtype=dtype)
    reader(parts, codes.numel(), dtype).write_exact(flat)
    assert bit_equal(flat, torch.where(lost, values, 0))
    assert torch.equal(read(parts, codes.numel(), dtype), codes)


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_a_block_has_the_narrowest_width_that_holds_its_largest_code(length: int, signed: bool) -> None:
    """The smallest and the largest code of every length in bits, as number 17 of block 1 of the second chunk: that is
    element 128 * 4 + 4 * 1 + 1, and bit 4 * 1 + 2 of a word."""
    index, width = {6: (6, 7), 7: (6, 7), 8: (7, 11), 9: (7, 11), 10: (7, 11), 11: (7, 11)}.get(
        length, (length, length)
    )
    signed = signed and length > 0
    for code in {(1 << length) >> 1, (1 << length) - 1}:
        codes = torch.zeros(2048, dtype=torch.int32)
        codes[1024 + 517] = -code if signed else code
        parts = encode(codes)
        header = index + 8 * signed
        assert parts["headers"].tolist() == [0] * 16 + [header << 4] + [0] * 15
        assert parts["offsets"].tolist() == [0, 0, width + signed]
        planes = [(code >> plane & 1) << 6 for plane in range(width)]
        assert parts["words"].tolist() == planes + [1 << 6] * signed
        assert torch.equal(read(parts, 2048), codes)


def test_the_largest_code_is_that_of_the_widest_width() -> None:
    assert blocks.WIDTHS == blocks_format.WIDTHS
    assert blocks.MAX_CODE == 2047
    codes = torch.full((1024,), 2047, dtype=torch.int32)
    codes[::3] *= -1
    parts = encode(codes)
    assert parts["words"].numel() == 32 * (11 + 1)
    assert torch.equal(read(parts, 1024), codes)


def test_empty_blocks_cost_their_header_only() -> None:
    for chunks in (1, 3):
        parts = encode(torch.zeros(1024 * chunks, dtype=torch.int32))
        sizes = {name: part.nbytes for name, part in parts.items()}
        assert sizes == {"headers": 16 * chunks, "offsets": 4 * (chunks + 1), "words": 0}


def test_the_sign_plane_is_dropped_where_nothing_is_negative() -> None:
    codes = torch.full((1024,), 3, dtype=torch.int32)
    assert encode(codes)["words"].numel() == 32 * 2
    codes[40] = -3
    assert encode(codes)["words"].numel() == 32 * 2 + 1


def test_every_element_has_a_bit_of_its_own() -> None:
    """One code at a time, in all 1024 places, with its sign: a block's number and its two words say where it was."""
    for place in range(1024):
        codes = torch.zeros(1024, dtype=torch.int32)
        codes[place] = -1
        parts = encode(codes)
        block, number = place % 128 // 4, place // 128 * 4 + place % 4
        assert element_at(block, number) == place
        assert parts["headers"].tolist() == [9 << 4 * (block % 2) if at == block // 2 else 0 for at in range(16)]
        word = 1 << PLACES[number]
        assert parts["words"].tolist() == [word - (1 << 32) if word >> 31 else word] * 2


def test_the_last_number_is_the_sign_bit_of_a_word() -> None:
    codes = torch.ones(1024, dtype=torch.int32)
    codes[element_at(0, 31)] = -1
    parts = encode(codes)
    assert parts["words"][:2].tolist() == [-1, -(1 << 31)]
    assert torch.equal(read(parts, 1024), codes)


@pytest.mark.parametrize(
    ("dtype", "first", "last"),
    [
        (torch.float16, [0x0000_3C00], [0x03FF_8000]),
        (torch.bfloat16, [0x0000_3F80], [0x03FF_8000]),
        (torch.float32, [0, 0x3F80_0000], [1023, -(1 << 31)]),
        (torch.float64, [0, 0, 0x3FF0_0000], [1023, 0, -(1 << 31)]),
    ],
    ids=str,
)
def test_escapes_by_hand(dtype: torch.dtype, first: list[int], last: list[int]) -> None:
    """1 at the first place of the second chunk, -0 at its last; the planes of the chunk come before them. Element 476
    of a chunk is 128 * 3 + 4 * 23: number 12 of block 23, bit 4 * 4 + 1."""
    codes, values = torch.zeros(2048, dtype=torch.int32), torch.full((2048,), 5.0, dtype=dtype)
    codes[1500] = 1
    values[1024], values[2047] = 1.0, -0.0
    lost = torch.zeros(2048, dtype=torch.bool)
    lost[[1024, 2047]] = True
    parts = encode(codes, lost, values)
    assert parts["words"].tolist() == [1 << 17, *first, *last]
    assert parts["offsets"].tolist() == [0, 0, 1 + 2 * len(first)]


@pytest.mark.parametrize(
    ("dtype", "escaped", "planes", "words"),
    [
        (torch.float16, 511, 0, 511),
        (torch.float16, 511, 1, None),
        (torch.bfloat16, 512, 0, None),
        (torch.float32, 511, 1, 1023),
        (torch.float32, 511, 2, None),
        (torch.float32, 512, 0, None),
        (torch.float64, 682, 1, 2047),
        (torch.float64, 682, 2, None),
        (torch.float64, 683, 0, None),
    ],
    ids=str,
)
def test_a_chunk_is_raw_once_it_would_not_be_smaller(
    dtype: torch.dtype, escaped: int, planes: int, words: int | None
) -> None:
    """An escape is one, two or three words, one code of n bits n words; ``words`` is None where that makes it raw."""
    codes, lost, values = torch.zeros(1024, dtype=torch.int32), torch.arange(1024) < escaped, draw_bits(1024, dtype)
    codes[1023] = (1 << planes) - 1
    parts = encode(codes, lost, values)
    assert parts["words"].numel() == (WHOLE[dtype] if words is None else words)
    assert (parts["headers"].tolist() == [8] + [0] * 15) == (words is None)
    flat = torch.zeros(1024, dtype=dtype)
    reader(parts, 1024, dtype).write_exact(flat)
    assert bit_equal(flat, values if words is None else torch.where(lost, values, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 1023])
def test_a_short_chunk_is_measured_by_the_values_it_has(count: int, dtype: torch.dtype) -> None:
    whole = -(-count * dtype.itemsize // 4)
    assert exact.raw_words(dtype, count) == whole
    values = draw_bits(count, dtype)
    nothing, everything = torch.zeros(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
    codes = torch.zeros(count, dtype=torch.int32)
    assert encode(codes, nothing, values)["words"].numel() == 0
    raw = encode(codes, everything, values)
    assert (raw["offsets"].tolist(), raw["headers"].tolist()) == ([0, whole], [8] + [0] * 15)
    row = bytes(raw["words"].view(torch.uint8).tolist())
    assert row == bytes(values.view(torch.uint8).tolist()) + bytes(4 * whole - count * dtype.itemsize)
    if whole <= 11:
        codes[0] = (1 << next(width for width in blocks.WIDTHS if width >= whole)) - 1
        assert encode(codes, nothing, values)["headers"][0] == 8


def test_any_stretch_that_starts_on_a_chunk_reads_alike() -> None:
    codes, lost, values = draw(5000, torch.float32, signed=True, share=0.01)
    lost[2048:3072] = True
    codes[lost] = 0
    source = reader(encode(codes, lost, values), 5000)
    for start, stop in [(0, 32), (0, 5000), (1024, 2048), (1024, 1030), (2048, 5000), (4096, 4097), (3072, 3072)]:
        seen, negative = source.read(start, stop)
        assert torch.equal(torch.where(negative, -seen, seen), codes[start:stop])


def test_streams_join_to_what_one_write_gives() -> None:
    codes, lost, values = draw(4096 + 100, torch.float16, signed=True, share=0.1)
    whole = encode(codes, lost, values)
    cuts = [slice(0, 1024), slice(1024, 3072), slice(3072, 4196)]
    streams = [blocks.write(codes[cut].abs(), codes[cut] < 0, lost[cut], values[cut]) for cut in cuts]
    assert [stream.counts.numel() for stream in streams] == [1, 2, 2]
    joined = blocks.join(streams)
    assert all(torch.equal(joined[name], part) for name, part in whole.items())


def test_words_beyond_what_the_chunks_use_are_left_alone() -> None:
    """A GPU's buffer is made before its size is known."""
    codes, lost, values = draw(3000, torch.float32, signed=True, share=0.01)
    parts = encode(codes, lost, values)
    parts["words"] = torch.cat([parts["words"], torch.full((77,), -1, dtype=torch.int32)])
    assert torch.equal(read(parts, 3000), codes)
    flat = torch.zeros(3000)
    reader(parts, 3000).write_exact(flat)
    assert bit_equal(flat, torch.where(lost, values, 0))


@pytest.mark.parametrize(
    ("part", "change"), [(part, change) for part in NAMES for change in ("shorter", "longer")][:-1]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_of_the_wrong_length_contradicts_the_others(part: str, change: str, dtype: torch.dtype) -> None:
    parts = encode(*draw(3000, dtype, signed=True, share=0.05))
    tensor = parts[part]
    parts[part] = tensor[:-1] if change == "shorter" else torch.cat([tensor, tensor[-1:]])
    message = "contradict each other" if part == "words" else "do not describe 3000 values"
    with pytest.raises(PayloadError, match=f"^blocks payload: .*{message}: truncated or corrupted"):
        reader(parts, 3000, dtype)


def test_a_count_or_a_size_of_values_that_does_not_fit_is_refused() -> None:
    codes, lost, values = draw(3000, torch.float32, signed=True, share=0.0)
    lost[2048:] = True
    parts = encode(codes.masked_fill(lost, 0), lost, values)
    with pytest.raises(PayloadError, match="48 header bytes and 4 chunk offsets do not describe 5000 values"):
        reader(parts, 5000)
    for count, dtype in [(2999, torch.float32), (3000, torch.float16), (3000, torch.float64)]:
        with pytest.raises(PayloadError, match="contradict each other"):
            reader(parts, count, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_header_that_promises_another_word_is_refused(chunk: int, dtype: torch.dtype) -> None:
    """Chunk 0 is coded without escapes, chunk 1 raw, chunk 2 short: a plane more than its words in any of them."""
    codes, lost, values = draw(3000, dtype, signed=False, share=0.0)
    codes[codes >= 16] = 5
    lost[1024:2048] = True
    parts = encode(codes.masked_fill(lost, 0), lost, values)
    reader(parts, 3000, dtype)
    parts["headers"][16 * chunk + 1] += 1
    with pytest.raises(PayloadError, match=r"headers, offsets and .* words contradict each other"):
        reader(parts, 3000, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("entry", "change"), [(0, 1), (0, -1), (1, -400), (2, 1 << 20), (3, 1), (3, -1)])
def test_offsets_that_contradict_the_headers_are_refused(entry: int, change: int, dtype: torch.dtype) -> None:
    """Read, such offsets would give another chunk's values or an index error."""
    parts = encode(*draw(3000, dtype, signed=True, share=0.0))
    parts["offsets"][entry] += change
    with pytest.raises(PayloadError, match=r"headers, offsets and .* words contradict each other"):
        reader(parts, 3000, dtype)


@pytest.mark.parametrize(("dtype", "spare"), [(torch.float32, 1), (torch.float64, 1), (torch.float64, 2)], ids=str)
def test_part_of_an_escape_is_refused(dtype: torch.dtype, spare: int) -> None:
    """Words at the end of a chunk that are not enough for an escape, known to the offsets as well."""
    parts = encode(*draw(3000, dtype, signed=True, share=0.01))
    parts["words"] = torch.cat([parts["words"], parts["words"].new_zeros(spare)])
    parts["offsets"][-1] += spare
    with pytest.raises(PayloadError, match="contradict each other"):
        reader(parts, 3000, dtype)


def test_more_escapes_than_a_chunk_has_places_are_refused() -> None:
    """1025 words that no header explains would be 1025 escapes of 16 bits."""
    parts = encode(torch.zeros(1024, dtype=torch.int32))
    parts |= {"words": torch.zeros(1025, dtype=torch.int32), "offsets": torch.tensor([0, 1025], dtype=torch.int32)}
    with pytest.raises(PayloadError, match="contradict each other"):
        reader(parts, 1024, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("chunk", "position"), [(0, 1024), (0, 0xFFFF), (1, 6), (1, 1023)])
def test_an_escape_outside_its_chunk_is_refused(chunk: int, position: int, dtype: torch.dtype) -> None:
    """The second chunk has six values."""
    lost = torch.zeros(1030, dtype=torch.bool)
    lost[1024 * chunk] = True
    parts = encode(torch.zeros(1030, dtype=torch.int32), lost, torch.ones(1030, dtype=dtype))
    source = reader(parts, 1030, dtype)
    source.write_exact(torch.zeros(1030, dtype=dtype))
    word = position << 16 if dtype.itemsize == 2 else position
    parts["words"][0] = word - (1 << 32) if word >> 31 else word
    with pytest.raises(PayloadError, match="an escape lies outside its chunk: the payload is corrupted"):
        reader(parts, 1030, dtype).write_exact(torch.zeros(1030, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_negative_position_is_refused(dtype: torch.dtype) -> None:
    lost = torch.arange(1024) == 5
    parts = encode(torch.zeros(1024, dtype=torch.int32), lost, torch.ones(1024, dtype=dtype))
    parts["words"][0] = -1
    with pytest.raises(PayloadError, match="an escape lies outside its chunk"):
        reader(parts, 1024, dtype).write_exact(torch.zeros(1024, dtype=dtype))
