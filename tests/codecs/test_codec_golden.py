"""Bytes of a fixed input, written down: a payload kept by one version must read the same in the next.

If one of these fails, the format has changed: raise ``version`` of the codec (or the container's, if all of them
fail), keep reading the old one or refuse it, and then write the new digest here.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
import rans_format
import torch
from blocks_format import escapes, raw_chunks
from torch import Tensor

from lowtide.codecs import create
from lowtide.coding import rans, rans_fit
from lowtide.records import Bound, Encoded


def ramp(count: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values in sixteenths between -3 and 3, in no order, exact in every float type; no zeros."""
    return ((torch.arange(count) * 37 % 97 - 48) * 2 + 1).to(dtype) / 32


def widening(count: int) -> Tensor:
    """A block next to zero, then blocks of twice the values of the block before, 12 times; then all without signs."""
    block = torch.arange(count) % 128 // 4
    values = torch.ldexp(ramp(count), torch.where(block % 13 == 0, -14, block % 13 - 4))
    return torch.where(block // 13 % 2 == 1, values.abs(), values)


def sz(x: Tensor, bound: float | Tensor = 0.25, *, axes: tuple[int, ...] = (), **options: object) -> Encoded:
    return create("sz", **options).encode(x, Bound.absolute(bound, axes), seed=0xFEEDFACE12345678)


def groups(x: Tensor, **options: object) -> Encoded:
    return create("groups", **options).encode(x, seed=0xFEEDFACE12345678)


def coded(name: str, x: Tensor, **options: object) -> Encoded:
    """By a codec that takes no bound."""
    return create(name, **options).encode(x, seed=0xFEEDFACE12345678)


def cusz(x: Tensor, bound: float | Tensor = 0.25, *, axes: tuple[int, ...] = (), **options: object) -> Encoded:
    return create("cusz", **options).encode(x, Bound.absolute(bound, axes), seed=0xFEEDFACE12345678)


def sz_rans(
    x: Tensor,
    bound: float | Tensor = 0.25,
    *,
    axes: tuple[int, ...] = (),
    values: int = 2,
    low: int = -4,
    predicted: bool = False,
    **options: bool,
) -> Encoded:
    """By a model that is written down as well: 8 digits at most, each half as likely as the one before."""
    codec = create("sz", coder="rans", **options)
    size = {4: 4, 3: 6}.get(values, 8)
    alphabet = rans.Alphabet(values, size, low, codec.keep_zeros, 1, 12, predicted)
    digits = torch.arange(alphabet.symbols).unsqueeze(1) // torch.tensor([size**k for k in range(values)]) % size
    freqs = rans_fit.normalise((0.5 ** (digits + 1).sum(1).double()).tolist(), 0, every=predicted)
    model = rans.Model(alphabet, torch.tensor(freqs, dtype=torch.int16), 4.0)
    plan = codec.plan(x, Bound.absolute(bound, axes))
    return codec.encode(x, seed=0xFEEDFACE12345678, plan=replace(plan, model=model))


def with_specials(x: Tensor) -> Tensor:
    x[3], x[40], x[41], x[90] = math.nan, math.inf, -math.inf, 1e30 if x.itemsize > 2 else 3e4
    return x


PAYLOADS = {
    "cusz": lambda: cusz(ramp(1200).view(2, 3, 10, 20), prediction="none"),
    "cusz_lorenzo": lambda: cusz(ramp(1200).view(2, 3, 10, 20), prediction="lorenzo"),
    "cusz_channels": lambda: cusz(ramp(600).view(2, 3, 100), torch.tensor([0.5, 0.03125, 0.25]), axes=(1,)),
    "cusz_dither_bf16": lambda: cusz(ramp(600, dtype=torch.bfloat16), 0.3, rounding="dither"),
    "cusz_escapes": lambda: cusz(with_specials(ramp(1500))),
    "cusz_rans": lambda: cusz(ramp(40_000), coder="rans"),
    "cusz_raw": lambda: cusz(ramp(40), 1e-9),
    "division": lambda: coded("division", ramp(1200).view(2, 3, 10, 20)),
    "division_row": lambda: coded("division", ramp(600).view(3, 200), bits=4),
    "division_1_bit": lambda: coded("division", ramp(150).view(1, 2, 5, 15), bits=1, block=4),
    "division_nearest_fp16": lambda: coded("division", ramp(200, dtype=torch.float16), bits=8, rounding="nearest"),
    "division_specials": lambda: coded("division", with_specials(ramp(400)).view(4, 100)),
    "division_fp64": lambda: coded("division", ramp(200, dtype=torch.float64) * 3),
    "division_faithful": lambda: coded("division", ramp(588).view(1, 3, 14, 14), faithful=True),
    "jpeg_act": lambda: coded("jpeg_act", ramp(1200).view(2, 3, 10, 20)),
    "jpeg_act_rows": lambda: coded("jpeg_act", with_specials(ramp(600).view(30, 20).view(-1)).view(30, 20)),
    "lossless": lambda: coded("lossless", with_specials(ramp(2000))),
    "lossless_zeros": lambda: coded("lossless", ramp(2000).relu_()),
    "lossless_rans": lambda: coded("lossless", ramp(40_000, dtype=torch.bfloat16), coder="rans"),
    "norm_groups": lambda: coded("norm_groups", ramp(600).view(4, 6, 25) * torch.arange(1, 7).view(6, 1)),
    "norm_groups_rows": lambda: coded("norm_groups", ramp(600).view(30, 20), bits=4, per="row"),
    "sample_groups": lambda: coded("sample_groups", ramp(1200).view(4, 300) * torch.arange(1, 5).view(4, 1)),
    "groups_1_bit": lambda: groups(ramp(600), bits=1),
    "groups_2_bits": lambda: groups(ramp(600)),
    "groups_4_bits": lambda: groups(ramp(600), bits=4, group=96),
    "groups_8_bits": lambda: groups(ramp(600), bits=8),
    "groups_nearest": lambda: groups(ramp(600), bits=4, rounding="nearest"),
    "groups_specials": lambda: groups(torch.cat([with_specials(ramp(256)), ramp(300).relu(), ramp(256) * 0 + 0.1])),
    "groups_fp16": lambda: groups(ramp(600, dtype=torch.float16) * 3),
    "groups_bf16": lambda: groups(ramp(600, dtype=torch.bfloat16) * 3),
    "groups_fp64": lambda: groups(ramp(600, dtype=torch.float64) * 3),
    "groups_empty": lambda: groups(torch.zeros(0, 3)),
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
    "sz_dither": lambda: sz(ramp(1500)),
    "sz_dither_every_width": lambda: sz(widening(2000)),
    "sz_dither_zero_code": lambda: sz(ramp(1500).relu_()),
    "sz_dither_escapes": lambda: sz(with_specials(ramp(1500))),
    "sz_dither_rows": lambda: sz(ramp(1800).view(3, 600), torch.tensor([0.5, 0.03125, 0.25]), axes=(0,)),
    "sz_dither_channels": lambda: sz(
        ramp(1800).view(2, 3, 300) + torch.tensor([[0.0], [-2.5], [9.25]]), torch.tensor([0.5, 0.125, 0.25]), axes=(1,)
    ),
    "sz_dither_fp16": lambda: sz(ramp(1500, dtype=torch.float16), 0.3),
    "sz_dither_bf16": lambda: sz(ramp(1500, dtype=torch.bfloat16), 0.3),
    "sz_dither_fp64": lambda: sz(ramp(1500, dtype=torch.float64), 0.3),
    "sz_dither_escapes_fp16": lambda: sz(with_specials(ramp(1500, dtype=torch.float16))),
    "sz_dither_escapes_bf16": lambda: sz(with_specials(ramp(1500, dtype=torch.bfloat16))),
    "sz_dither_escapes_fp64": lambda: sz(with_specials(ramp(1500, dtype=torch.float64))),
    "sz_stochastic": lambda: sz(ramp(1500).abs(), rounding="stochastic"),
    "sz_nearest": lambda: sz(ramp(1500), rounding="nearest"),
    "sz_nearest_every_width": lambda: sz(widening(2000), rounding="nearest"),
    "sz_nearest_unsigned": lambda: sz(ramp(1500).abs(), rounding="nearest"),
    "sz_nearest_zero_code": lambda: sz(ramp(1500).relu_(), rounding="nearest", keep_zeros=True),
    "sz_raw": lambda: sz(ramp(40), 1e-9),
    "sz_raw_fp16": lambda: sz(ramp(41, dtype=torch.float16), 1e-9),
    "sz_raw_fp64": lambda: sz(ramp(41, dtype=torch.float64), 1e-9),
    "sz_raw_chunk": lambda: sz(ramp(2500) * torch.where(torch.arange(2500) // 1024 == 1, 1e6, 1.0)),
    "sz_rans": lambda: sz_rans(ramp(4000)),
    "sz_rans_zero_code": lambda: sz_rans(ramp(4000).relu_(), low=0, keep_zeros=True),
    "sz_rans_escapes": lambda: sz_rans(with_specials(ramp(4000)), values=1),
    "sz_rans_escapes_fp16": lambda: sz_rans(with_specials(ramp(4000, dtype=torch.float16)), 0.6, values=3, low=-2),
    "sz_rans_escapes_bf16": lambda: sz_rans(with_specials(ramp(4000, dtype=torch.bfloat16)), 0.9, values=4, low=-1),
    "sz_rans_escapes_fp64": lambda: sz_rans(with_specials(ramp(4000, dtype=torch.float64)), values=1),
    "sz_rans_rows": lambda: sz_rans(ramp(4000).view(2, 2000), torch.tensor([0.5, 0.25]), axes=(0,), values=1),
    "sz_rans_raw": lambda: sz_rans(ramp(4000), 1e-9),
    "sz_rans_predicted_escapes": lambda: sz_rans(with_specials(ramp(4000)), predicted=True),
    "sz_rans_predicted_3_bf16": lambda: sz_rans(
        ramp(4000, dtype=torch.bfloat16), 0.6, values=3, low=-2, predicted=True
    ),
    "sz_empty": lambda: sz(torch.zeros(0, 3)),
}

DIGESTS = {
    "cusz": "ea5552c25bd8e9d95e8700089e967a91",
    "cusz_lorenzo": "7206c63d404e46acbbf9e2ac20673acf",
    "cusz_channels": "fa92f5997dfce4630381e44e17c0cea4",
    "cusz_dither_bf16": "687f317042d29945455a71942faf560f",
    "cusz_escapes": "4fd46a9630e19c8717e6913514bde03b",
    "cusz_rans": "3518d7acd4cbdfbc766f0d0871463441",
    "cusz_raw": "5b74b78866cc60092e501b67465b972e",
    "division": "e5ca6b8137fea97ac2ea104c79276379",
    "division_row": "ce8ea404f415ef1b3e1c2402e72e1c2e",
    "division_1_bit": "7bdc044d009cd0cac5db8c53b84d521e",
    "division_nearest_fp16": "5294e6f8f384a1f51eacb6d5e1a9b07f",
    "division_specials": "4aad825943dc88a046a232a2f62f8228",
    "division_fp64": "b4e7c55ccd16d46f7fe9492fa1c47e45",
    "division_faithful": "9fc36b61ef182b9a661df59fcdf0d5bb",
    "jpeg_act": "4636c321b7edcc6a5dbb1bc57a0209c8",
    "jpeg_act_rows": "1282323cbe98385ee136fd15f0c394c5",
    "lossless": "14940e321f93d285941f56029ab115b4",
    "lossless_zeros": "01205cb3d7f7bfdf3f25ee417056b266",
    "lossless_rans": "a13b61a34974331f9757a5ff31df524e",
    "norm_groups": "54a98afcefeb9d2ed369eabb8e984974",
    "norm_groups_rows": "d8cfa07bb2e6e62caa7dcac9effa4748",
    "sample_groups": "81291f9d5e8ee19442b1d2196bab5c91",
    "groups_1_bit": "ad361ec3a34b0c16a12082ee0c1f4165",
    "groups_2_bits": "75f8f606b0de1310e043b841269bd003",
    "groups_4_bits": "921d7f9e69711bc50aa2aa08cc4a89c9",
    "groups_8_bits": "fb6af10d64cdb8d49e047dc7b1ef65f9",
    "groups_nearest": "56f79c5c7d82a08f7214065413d93279",
    "groups_specials": "19e44da3e86da3f725119d207915f94f",
    "groups_fp16": "fe4dcb9dbb5445060bd1600da180d5e2",
    "groups_bf16": "fa97843ea9bb732e525ba3ff97399d39",
    "groups_fp64": "bbf79e2844fd800ef055064931788e06",
    "groups_empty": "da24ad33fdcd399665e34d4b1f57a8ef",
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
    "sz_dither": "e623e3d480ed11cd765ee92fe50b8efc",
    "sz_dither_every_width": "1c8bd25cda903e7996f97c1edccc3c31",
    "sz_dither_zero_code": "3a952a18cbd8a5fd8c3f7c1951d3a01b",
    "sz_dither_escapes": "7a9da6b4d5e1293dc664c7ad5c108228",
    "sz_dither_rows": "5dc98eb5e13b3768b421f11b6dba5fdd",
    "sz_dither_fp16": "eefb45b0919a81d8c1b3f2bbab43be9d",
    "sz_dither_bf16": "a8595b39e9742e833d02f0c12e6dcfe4",
    "sz_dither_fp64": "a5307252af2963a3b6cdee99245bd65a",
    "sz_dither_escapes_fp16": "7a10819b31559e548dc730361d2d8dda",
    "sz_dither_escapes_bf16": "9c4943851e42f84192a66a27b8a663c0",
    "sz_dither_escapes_fp64": "96c7bf8c7d04b6a920b1038128abb9f3",
    "sz_stochastic": "76f93941d093f5342fa9d143622a233e",
    "sz_nearest": "9010f07e2f6daa8d0326e24491e62bea",
    "sz_nearest_every_width": "888db77ff5392e64ce11cfe6a78d26ed",
    "sz_nearest_unsigned": "e9c0d4662561b24056d38e55acfab18e",
    "sz_nearest_zero_code": "58559a083f9a9ce186843dfff7b54a59",
    "sz_raw": "381bbddb8e18074a82a78a4011bcf75f",
    "sz_raw_fp16": "8dfb2cca46acb71f81822a76f31ccd9c",
    "sz_raw_fp64": "3584b2adc9dcd6f13eb334856c68a6c3",
    "sz_raw_chunk": "34bc5f3066c5a0416c57697625c35ddf",
    "sz_rans": "2dddb44eae0b77ec9380eff69cef8db9",
    "sz_rans_zero_code": "ad373cbdfa875977814b12db26c39831",
    "sz_rans_escapes": "2842c7696b7075f16228025016b5fcf3",
    "sz_rans_escapes_fp16": "07a7c193aefc51e80c336e882f3593df",
    "sz_rans_escapes_bf16": "7f8c515f0aa56a04031c4dbb597ea817",
    "sz_rans_escapes_fp64": "966f4689c17264c317c9d662300ab949",
    "sz_rans_rows": "e322e878d07629c7ba59be2358549513",
    "sz_rans_raw": "b4e35a0185ad2d2be657238e01080f02",
    "sz_rans_predicted_escapes": "87ab65467874ca9db74bdb62d1d28f8f",
    "sz_rans_predicted_3_bf16": "b6b345366afc6fd68f809de3c52f01cc",
    "sz_dither_channels": "b399f5fa77b40e1c977b5708f5b94e28",
    "sz_empty": "bfa2ad3270eeea71b379481390ff84c7",
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
    payloads = {name: PAYLOADS[name]() for name in PAYLOADS if name.startswith("sz_")}
    kinds = {name: payload.meta["kind"] for name, payload in payloads.items()}
    assert {name for name, kind in kinds.items() if kind == "empty"} == {"sz_empty"}
    assert {name for name, kind in kinds.items() if kind == "rans"} == {name for name in kinds if "rans" in name}
    zeros = {"sz_dither_zero_code", "sz_nearest_zero_code", "sz_rans_zero_code"}
    assert {name for name, payload in payloads.items() if payload.meta.get("zero_code")} == zeros
    for name in [name for name, kind in kinds.items() if kind == "blocks"]:
        raw = {"sz_raw_chunk": [1]}.get(name, [0] if name.startswith("sz_raw") else [])
        assert (name, raw_chunks(payloads[name])) == (name, raw)
        assert (name, list(escapes(payloads[name]))) == (name, [3, 40, 41, 90] if "escapes" in name else [])
        if "every_width" in name:
            headers = payloads[name].tensors["headers"].tolist()
            assert {nibble for byte in headers for nibble in (byte & 15, byte >> 4)} == set(range(16)) - {8}
    for name in [name for name, kind in kinds.items() if kind == "rans"]:
        found = rans_format.content(payloads[name])
        assert (name, len(found.raw)) == (name, 4000 if name == "sz_rans_raw" else 0)
        assert (name, sorted(found.escapes)) == (name, [3, 40, 41, 90] if "escapes" in name else [])
        assert found.raw or found.escaped_codes, f"{name}: no code is outside the alphabet"
        assert payloads[name].meta["alphabet"].get("predicted", False) == ("predicted" in name)
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
