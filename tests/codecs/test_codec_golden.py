"""Bytes of a fixed input, written down: a payload kept by one version must read the same in the next.

If one of these fails, the format has changed: raise ``version`` of the codec (or the container's, if all of them
fail), keep reading the old one or refuse it, and then write the new digest here.
"""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from blocks_format import escapes, raw_chunks
from torch import Tensor

from lowtide.codecs import create
from lowtide.records import Bound, Encoded


def ramp(count: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values in sixteenths between -3 and 3, in no order, exact in every float type; no zeros."""
    return ((torch.arange(count) * 37 % 97 - 48) * 2 + 1).to(dtype) / 32


def widening(count: int) -> Tensor:
    """Every block of 32 holds values twice those of the block before, 13 times; then the same without signs."""
    block = torch.arange(count) // 32
    values = torch.ldexp(ramp(count), block % 13 - 4)
    return torch.where(block // 13 % 2 == 1, values.abs(), values)


def sz(x: Tensor, bound: float | Tensor = 0.25, *, axes: tuple[int, ...] = (), **options: object) -> Encoded:
    return create("sz", **options).encode(x, Bound.absolute(bound, axes), seed=0xFEEDFACE12345678)


def with_specials(x: Tensor) -> Tensor:
    x[3], x[40], x[41], x[90] = math.nan, math.inf, -math.inf, 1e30 if x.itemsize > 2 else 3e4
    return x


PAYLOADS = {
    "identity": lambda: create("identity").encode(with_specials(ramp(96))),
    "identity_channels_last": lambda: create("identity").encode(
        ramp(120).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    ),
    "shape": lambda: create("shape", poison=True).encode(ramp(12).view(3, 4).t()),
    "bitmask_truth": lambda: create("bitmask").encode(ramp(99) > 0),
    "bitmask_not_le": lambda: create("bitmask", test="not_le", params=(0.0,)).encode(ramp(99)),
    "bitmask_sign": lambda: create("bitmask", test="sign", values=(0.0, 1.0, -1.0, math.nan)).encode(
        with_specials(ramp(99) * (torch.arange(99) % 3 > 0))
    ),
    "cast_bf16": lambda: create("cast").encode(with_specials(ramp(96)) * 1.001),
    "cast_fp8_e4m3": lambda: create("cast", to="fp8_e4m3").encode(ramp(96)),
    "cast_fp8_e5m2": lambda: create("cast", to="fp8_e5m2").encode(ramp(96, dtype=torch.float16)),
    "window_index_3x3": lambda: create(
        "window_index", kernel=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), plane=(8, 8)
    ).encode(torch.tensor([[0, 3, 5, 7], [16, 10, 20, 15], [24, 34, 29, 38], [48, 50, 53, 63]])),
    "window_index_plane": lambda: create("window_index").encode(torch.arange(20) * 977),
    "window_index_wide": lambda: create("window_index").encode(torch.tensor([1, 1 << 40])),
    "sz_dither": lambda: sz(ramp(1100)),
    "sz_dither_every_width": lambda: sz(widening(1100)),
    "sz_dither_zero_code": lambda: sz(ramp(1100).relu_()),
    "sz_dither_escapes": lambda: sz(with_specials(ramp(1100))),
    "sz_dither_rows": lambda: sz(ramp(1200).view(3, 400), torch.tensor([0.5, 0.03125, 0.25]), axes=(0,)),
    "sz_dither_fp16": lambda: sz(ramp(1100, dtype=torch.float16), 0.3),
    "sz_dither_bf16": lambda: sz(ramp(1100, dtype=torch.bfloat16), 0.3),
    "sz_dither_fp64": lambda: sz(ramp(1100, dtype=torch.float64), 0.3),
    "sz_dither_escapes_fp16": lambda: sz(with_specials(ramp(1100, dtype=torch.float16))),
    "sz_dither_escapes_bf16": lambda: sz(with_specials(ramp(1100, dtype=torch.bfloat16))),
    "sz_dither_escapes_fp64": lambda: sz(with_specials(ramp(1100, dtype=torch.float64))),
    "sz_nearest": lambda: sz(ramp(1100), rounding="nearest"),
    "sz_nearest_every_width": lambda: sz(widening(1100), rounding="nearest"),
    "sz_nearest_unsigned": lambda: sz(ramp(1100).abs(), rounding="nearest"),
    "sz_nearest_zero_code": lambda: sz(ramp(1100).relu_(), rounding="nearest", keep_zeros=True),
    "sz_raw": lambda: sz(ramp(40), 1e-9),
    "sz_raw_fp16": lambda: sz(ramp(41, dtype=torch.float16), 1e-9),
    "sz_raw_fp64": lambda: sz(ramp(41, dtype=torch.float64), 1e-9),
    "sz_raw_chunk": lambda: sz(ramp(2100) * torch.where(torch.arange(2100) // 1024 == 1, 1e6, 1.0)),
    "sz_empty": lambda: sz(torch.zeros(0, 3)),
}

DIGESTS = {
    "identity": "fe0e9e44a2f5f0d6ff34d93684f9b9b5",
    "identity_channels_last": "6c6e26f5664cdd47d08b9e3a40e93b98",
    "shape": "c560aa71fc958a66e25c330324a16406",
    "bitmask_truth": "2882fe56f578ad53cc91db918515a3d5",
    "bitmask_not_le": "fb7518d3aeb52a7d578a646718cd8360",
    "bitmask_sign": "70120e1d9355693790591b9da2dcde37",
    "cast_bf16": "db3f86094b001f98001c2a8b37642e3d",
    "cast_fp8_e4m3": "80d09e67355687c84ebcb7859c73dc44",
    "cast_fp8_e5m2": "c9dabbfa4d99628b233ca6f209d369e8",
    "window_index_3x3": "616b1f1d2e5d5bf11f984a33c6a5b8a0",
    "window_index_plane": "dad4fa87c473b9fa2e2328159c838a9d",
    "window_index_wide": "9c061198d99d3208b166a2cef7513133",
    "sz_dither": "9a78c0a24541ce0ce5bd4d7d72e80838",
    "sz_dither_every_width": "204cd4ee5ae515c95ea2352546904e20",
    "sz_dither_zero_code": "5a70dae3137763d2cf094c111a14fea5",
    "sz_dither_escapes": "474007bfb9739b210c6a6a1ee36c9af6",
    "sz_dither_rows": "eee22faea9ab1c7465d3220b0d8c44f7",
    "sz_dither_fp16": "27fdbb88a13b57fa4249d377653e747a",
    "sz_dither_bf16": "51d6313c31579bed9dea1a81700d6992",
    "sz_dither_fp64": "af71124c9499bb202dd8e91376abb861",
    "sz_dither_escapes_fp16": "58f9fd611212e43336a35b60725d0ac3",
    "sz_dither_escapes_bf16": "378d1decee5ef20285c3b5000fc316ec",
    "sz_dither_escapes_fp64": "1aa4c03b7f46f62217f8e59632b4bc33",
    "sz_nearest": "ee5431b529ffe8fd3f331ef45b51347d",
    "sz_nearest_every_width": "a29c5ca6d5a44642bfca6b245fb9d5ef",
    "sz_nearest_unsigned": "22b75806edaedb4997dfb15b293415f5",
    "sz_nearest_zero_code": "b4c95cfc77fd9e052f182a18357c1ce5",
    "sz_raw": "ab29ecd7d57501a09af67b59d08e7551",
    "sz_raw_fp16": "cb5477cb82bbc981d27cf059ded6b213",
    "sz_raw_fp64": "18feac7983789578eed8a81e5567d56c",
    "sz_raw_chunk": "214c9c78cd12d65ad947e5235cfdede6",
    "sz_empty": "33d0c1dd5a214110e92502bf7f40c29f",
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_bytes_are_those_written_down(name: str) -> None:
    encoded = PAYLOADS[name]()
    digest = hashlib.sha256(encoded.to_bytes()).hexdigest()[:32]
    assert digest == DIGESTS.get(name), (
        f"{name}: the bytes of {encoded.codec} format version {encoded.version} changed. If that is meant, bump the "
        f"version of {encoded.codec} and write {digest!r} here"
    )


def test_the_payloads_take_the_paths_they_are_named_for() -> None:
    meta = {name: PAYLOADS[name]().meta for name in PAYLOADS if name.startswith("sz_")}
    assert {name for name in meta if meta[name]["kind"] == "empty"} == {"sz_empty"}
    assert {name for name in meta if meta[name].get("zero_code")} == {"sz_dither_zero_code", "sz_nearest_zero_code"}
    for name in meta.keys() - {"sz_empty"}:
        encoded = PAYLOADS[name]()
        raw = {"sz_raw_chunk": [1]}.get(name, [0] if name.startswith("sz_raw") else [])
        assert (name, raw_chunks(encoded)) == (name, raw)
        assert (name, list(escapes(encoded))) == (name, [3, 40, 41, 90] if "escapes" in name else [])
        if "every_width" in name:
            headers = {nibble for byte in encoded.tensors["headers"].tolist() for nibble in (byte & 15, byte >> 4)}
            assert headers == set(range(16)) - {8}
    assert PAYLOADS["window_index_3x3"]().meta["width"] == 4


def test_a_whole_payload_by_hand() -> None:
    """Three booleans: magic, container version 1, length of the header, header, one byte of bits, CRC-32."""
    blob = create("bitmask").encode(torch.tensor([True, False, True])).to_bytes()
    assert blob[:4] == b"LWTD"
    assert blob[4:6] == b"\x01\x00"
    header = (
        b'{"codec":"bitmask","device":"cpu","dtype":"bool","meta":{"values":[0.0,1.0],"width":1},'
        b'"parts":[["codes","uint8",1]],"shape":[3],"stride":[1],"version":1}'
    )
    assert int.from_bytes(blob[6:10], "little") == len(header)
    assert blob[10:-5] == header
    assert blob[-5:-4] == b"\x05"
