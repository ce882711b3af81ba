"""A payload that is not what it says it is: every codec names the cause, whichever way it was damaged."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from codec_cases import CASES, Case, bit_equal

from lowtide import codecs
from lowtide.errors import FormatVersionError, PayloadError, PolicyError, UnknownNameError
from lowtide.records import Encoded

SHAPE = (5, 16, 25)


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture
def encoded(case: Case) -> Encoded:
    return case.encode(case.make(SHAPE))


def _parts(*, empty: bool = True) -> list[object]:
    """Every part of every case's payload, by name: what a codec writes is what its decoder has to ask for.

    A part without elements can be missing or of another dtype, but not of another length."""
    torch.manual_seed(0)
    found = []
    for case in CASES:
        payload = case.encode(case.make(SHAPE))
        chosen = [part for part, tensor in payload.tensors.items() if empty or tensor.numel()]
        found += [pytest.param(payload, part, id=f"{case}-{part}") for part in chosen]
    return found


def test_a_payload_of_another_codec_is_refused(case: Case, encoded: Encoded) -> None:
    foreign = dataclasses.replace(encoded, codec="other")
    with pytest.raises(PayloadError, match=f"payload was written by codec 'other', not '{case.name}'"):
        case.create().decode(foreign)
    with pytest.raises(UnknownNameError, match="unknown codec 'other'; known: .*" + case.name):
        codecs.decode(foreign)


def test_a_payload_of_another_version_is_refused(case: Case, encoded: Encoded) -> None:
    newer = dataclasses.replace(encoded, version=encoded.version + 98)
    expected = f"{case.name} payload has format version {newer.version}; this Lowtide reads version {encoded.version}"
    with pytest.raises(FormatVersionError, match=expected):
        case.create().decode(newer)


@pytest.mark.parametrize(("payload", "part"), _parts())
def test_a_missing_part_is_named(payload: Encoded, part: str) -> None:
    left = {name: tensor for name, tensor in payload.tensors.items() if name != part}
    with pytest.raises(PayloadError, match="lacks its"):
        codecs.decode(dataclasses.replace(payload, tensors=left))


@pytest.mark.parametrize(("payload", "part"), _parts(empty=False))
def test_a_truncated_part_is_refused(payload: Encoded, part: str) -> None:
    cut = {**payload.tensors, part: payload.tensors[part][:-1]}
    with pytest.raises(PayloadError, match="corrupted"):
        codecs.decode(dataclasses.replace(payload, tensors=cut))


@pytest.mark.parametrize(("payload", "part"), _parts(empty=False))
def test_a_part_that_is_too_long_is_refused(payload: Encoded, part: str) -> None:
    """But for the words of sz: a GPU makes room for them before it knows how many there are."""
    tensor = payload.tensors[part]
    tensors = {**payload.tensors, part: torch.cat([tensor.view(torch.uint8)] * 2).view(tensor.dtype)}
    longer = dataclasses.replace(payload, tensors=tensors)
    if (payload.codec, part) == ("sz", "words"):
        assert bit_equal(codecs.decode(longer), codecs.decode(payload))
    else:
        with pytest.raises(PayloadError, match="corrupted"):
            codecs.decode(longer)


@pytest.mark.parametrize(("payload", "part"), _parts())
def test_a_part_of_another_dtype_is_refused(payload: Encoded, part: str) -> None:
    retyped = {**payload.tensors, part: payload.tensors[part].to(torch.complex64)}
    with pytest.raises(PayloadError, match="corrupted"):
        codecs.decode(dataclasses.replace(payload, tensors=retyped))


def test_cut_off_bytes_are_refused(encoded: Encoded) -> None:
    blob = encoded.to_bytes()
    for length in (0, 3, 4, 13):
        with pytest.raises(PayloadError, match=r"not a Lowtide payload: .* or it is cut off"):
            Encoded.from_bytes(blob[:length])
    for length in (14, 40, len(blob) // 2, len(blob) - 4, len(blob) - 1):
        with pytest.raises(PayloadError, match=f"payload of {length} bytes fails its checksum: truncated or corrupted"):
            Encoded.from_bytes(blob[:length])


def test_one_flipped_bit_anywhere_is_noticed(encoded: Encoded) -> None:
    blob = encoded.to_bytes()
    for at in {*range(12), *range(12, len(blob), max(len(blob) // 50, 1)), len(blob) - 1}:
        damaged = bytearray(blob)
        damaged[at] ^= 1 << at % 8
        message = "not a Lowtide payload" if at < 4 else "container has version" if at < 6 else "fails its checksum"
        with pytest.raises(PayloadError, match=message):
            Encoded.from_bytes(bytes(damaged))


def test_another_container_version_is_refused_even_with_a_sound_checksum(encoded: Encoded) -> None:
    blob = bytearray(encoded.to_bytes())
    blob[4:6] = struct.pack("<H", 2)
    blob[-4:] = struct.pack("<I", zlib.crc32(blob[:-4]))
    with pytest.raises(FormatVersionError, match="payload container has version 2; this Lowtide reads 1"):
        Encoded.from_bytes(bytes(blob))


def test_bytes_of_something_else_are_refused() -> None:
    with pytest.raises(PayloadError, match="the first four bytes are not 'LWTD'"):
        Encoded.from_bytes(b"PK\x03\x04" + bytes(100))


def with_header(encoded: Encoded, change: Mapping[str, Any] | bytes) -> bytes:
    """The bytes of a payload with another header and a checksum that fits it."""
    blob = encoded.to_bytes()
    end = 10 + struct.unpack("<I", blob[6:10])[0]
    text = change if isinstance(change, bytes) else json.dumps({**json.loads(blob[10:end]), **change}).encode()
    blob = blob[:6] + struct.pack("<I", len(text)) + text + blob[end:-4]
    return blob + struct.pack("<I", zlib.crc32(blob))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff\xfe{}", id="not_utf8"),
        pytest.param(b"{", id="not_json"),
        pytest.param(b"[1]", id="not_an_object"),
        pytest.param(b"{}", id="no_fields"),
        pytest.param({"shape": None}, id="no_shape"),
        pytest.param({"dtype": "float31"}, id="no_such_dtype"),
        pytest.param({"dtype": "nn"}, id="dtype_is_a_module"),
        pytest.param({"device": "gpu"}, id="no_such_kind_of_device"),
        pytest.param({"device": "cuda:99"}, id="no_such_device"),
        pytest.param({"parts": [["raw", "float32"]]}, id="part_without_a_length"),
        pytest.param({"parts": [["raw", "Tensor", 6]]}, id="part_is_no_dtype"),
        pytest.param({"parts": [["raw", "float32", 1.5]]}, id="part_of_half_a_value"),
        pytest.param({"parts": [["raw", "float32", 6], ["more", "float32", 1]]}, id="part_beyond_the_end"),
        pytest.param(b"[" * 10_000, id="nested_without_end"),
    ],
)
def test_a_header_that_cannot_be_read_is_refused_even_with_a_sound_checksum(change: Mapping[str, Any] | bytes) -> None:
    encoded = codecs.create("identity").encode(torch.randn(2, 3))
    assert Encoded.from_bytes(with_header(encoded, {})).spec == encoded.spec
    blob = with_header(encoded, change)
    with pytest.raises(PayloadError, match=f"payload of {len(blob)} bytes has a header that cannot be read: "):
        Encoded.from_bytes(blob)


@pytest.mark.parametrize(
    ("width", "values"),
    [(3, (0.0, 1.0)), (0, (0.0,)), (2, (0.0, 1.0)), (1, (0.0, 1.0, 2.0, 3.0)), (1, (0.0,)), (1, ())],
)
def test_bitmask_refuses_values_that_do_not_match_the_width(width: int, values: tuple[float, ...]) -> None:
    """Too few, and a code would find no value; too many, and the payload is not what its writer wrote."""
    encoded = codecs.create("bitmask", test="not_le", params=(0.0,)).encode(torch.randn(9))
    with pytest.raises(PayloadError, match=f"bitmask payload: {len(values)} values for {width} bits: corrupted"):
        codecs.decode(dataclasses.replace(encoded, meta={"width": width, "values": values}))


def test_bitmask_refuses_to_write_what_it_would_refuse_to_read() -> None:
    """Three stand-ins for the four classes of ``sign``: each falls into its class, but the fourth code has none."""
    for values in ((), (0.0,), (0.0, 1.0, -1.0), (0.0,) * 5):
        with pytest.raises(PolicyError, match=f"bitmask has a stand-in for .* 2 or 4 classes, got {len(values)}"):
            codecs.create("bitmask", test="sign", values=values)


def test_nbytes_counts_a_shared_storage_once() -> None:
    whole = torch.zeros(100)
    spec = codecs.create("shape").encode(whole).spec
    assert Encoded("x", 1, spec, tensors={"a": whole[:10], "b": whole[50:]}).nbytes == 400
    assert Encoded("x", 1, spec, tensors={"a": whole, "b": torch.zeros(3)}).nbytes == 412
    assert Encoded("x", 1, spec).nbytes == 0
