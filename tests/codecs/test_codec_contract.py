"""What holds for every codec in the registry: a new file in ``lowtide.codecs`` is tested here without an edit."""

from __future__ import annotations

import json

import pytest
import torch
from codec_cases import CASES, DTYPES, Case, bit_equal, lay_out, same_geometry

from lowtide import codecs
from lowtide.errors import BoundError, DtypeError, LayoutError
from lowtide.records import Encoded, TensorSpec
from lowtide.registry import CODECS

LARGE = (5, 16, 25)  # two thousand values: more than one chunk of 1024
SHAPES = [(0,), (3, 0, 2), (), (1,), (1, 1, 1), (3, 5, 7), (2, 3, 2, 3, 5), LARGE]
LAYOUTS = {
    "contiguous": ((2, 3, 4, 5), (0, 1, 2, 3)),
    "channels_last": ((2, 3, 4, 5), (0, 2, 3, 1)),
    "channels_last_single_channel": ((2, 1, 4, 5), (0, 2, 3, 1)),
    "transposed": ((13, 7), (1, 0)),
    "permuted_5d": ((2, 3, 4, 3, 2), (3, 0, 4, 2, 1)),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


def test_every_registered_codec_has_a_case() -> None:
    assert {case.name for case in CASES} == set(CODECS.names())


def test_the_class_carries_its_registry_name_and_a_version(case: Case) -> None:
    codec = case.create()
    encoded = case.encode(case.make((4, 6)))
    assert (codec.name, encoded.codec) == (case.name, case.name)
    assert encoded.version == type(codec).version >= 1


def test_equal_options_make_equal_codecs(case: Case) -> None:
    assert case.create() == case.create()
    assert hash(case.create()) == hash(case.create())


def test_takes_bound_says_whether_encode_needs_one(case: Case) -> None:
    codec, x = case.create(), case.make((4, 6))
    assert codec.takes_bound == (case.bound is not None)
    if codec.takes_bound:
        with pytest.raises(BoundError, match=f"^{case.name} needs an error bound"):
            codec.encode(x)
    else:
        assert same_geometry(codec.decode(codec.encode(x)), x)


def test_carries_values_says_whether_values_come_back(case: Case) -> None:
    """To an eighth of themselves, the coarsest of the codecs. Integers may come back by another way than as values."""
    x = case.make(LARGE)
    if x.is_floating_point():
        error = (case.create().decode(case.encode(x)).double() - x.double()).abs()
        near = error <= torch.clamp(x.double().abs() / 8, min=case.limit or 1e-3)
        assert bool(near[x.isfinite()].all()) == case.create().carries_values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_geometry_survives_for_any_shape(case: Case, shape: tuple[int, ...], device: str) -> None:
    x = case.make(shape).to(device)
    encoded = case.encode(x)
    assert encoded.spec == TensorSpec.of(x)
    assert same_geometry(case.create().decode(encoded), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_geometry_and_values_survive_any_dense_layout(case: Case, layout: str) -> None:
    shape, order = LAYOUTS[layout]
    plain = case.make(shape)
    x = lay_out(plain, order)
    decoded = case.create().decode(case.encode(x))
    assert same_geometry(decoded, x)
    if case.elementwise:
        assert bit_equal(decoded, case.create().decode(case.encode(plain)))
    else:
        assert case.limit is not None, "a codec that is not elementwise states how far it may be off"
        error = (decoded.double() - x.double()).abs()
        assert bool((error <= case.limit)[x.isfinite()].all())
        assert torch.equal(decoded.isfinite(), x.isfinite())


def test_encode_neither_changes_nor_keeps_its_input(case: Case) -> None:
    x = case.make(LARGE)
    before, version, pointer = x.clone(), x._version, x.untyped_storage().data_ptr()
    encoded = case.encode(x)
    assert bit_equal(x, before)
    assert x._version == version
    assert pointer not in {part.untyped_storage().data_ptr() for part in encoded.tensors.values()}
    first = case.create().decode(encoded)
    x.zero_()
    assert bit_equal(case.create().decode(encoded), first)


def test_decode_gives_a_new_tensor_every_time(case: Case) -> None:
    encoded = case.encode(case.make(LARGE))
    first, second = case.create().decode(encoded), case.create().decode(encoded)
    assert bit_equal(first, second)
    kept = [part.untyped_storage().data_ptr() for part in encoded.tensors.values() if part.numel()]
    storages = [first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr(), *kept]
    assert len(set(storages)) == len(storages), "a decoded tensor shares memory with the payload or with another"
    first.zero_()
    assert bit_equal(case.create().decode(encoded), second)


def test_a_payload_names_all_that_its_decoder_needs(case: Case) -> None:
    encoded = case.encode(case.make(LARGE))
    assert bit_equal(codecs.decode(encoded), case.create().decode(encoded))


def test_encode_is_a_function_of_input_bound_and_seed(case: Case) -> None:
    x = case.make(LARGE)
    torch.manual_seed(1)
    first = case.encode(x, seed=5).to_bytes()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert case.encode(x, seed=5).to_bytes() == first
    assert torch.equal(torch.get_rng_state(), state), "encode drew from the global random numbers"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_round_trip(case: Case, shape: tuple[int, ...]) -> None:
    encoded = case.encode(case.make(shape))
    blob = encoded.to_bytes()
    again = Encoded.from_bytes(blob)
    assert (again.codec, again.version, again.spec) == (encoded.codec, encoded.version, encoded.spec)
    # As text, since a NaN among the metadata does not equal itself.
    assert json.dumps(again.meta, sort_keys=True) == json.dumps(encoded.meta, sort_keys=True)
    assert list(again.tensors) == list(encoded.tensors)
    assert all(bit_equal(again.tensors[name], part) for name, part in encoded.tensors.items())
    assert again.to_bytes() == blob
    assert bit_equal(codecs.decode(again), codecs.decode(encoded))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nbytes_counts_the_storages_and_they_hold_no_more_than_the_parts(case: Case, shape: tuple[int, ...]) -> None:
    encoded = case.encode(case.make(shape))
    assert encoded.nbytes == sum(part.untyped_storage().nbytes() for part in encoded.tensors.values())
    assert encoded.nbytes == sum(part.numel() * part.itemsize for part in encoded.tensors.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_is_stored_or_refused_as_accepts_says(case: Case, dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    codec = case.create()
    if codec.accepts(dtype):
        assert same_geometry(codec.decode(case.encode(x)), x)
    else:
        with pytest.raises(DtypeError, match=rf"^{case.name} .*{dtype}"):
            case.encode(x)


def test_a_tensor_with_gaps_is_refused(case: Case) -> None:
    values = case.make((4, 6))
    spread = values.new_zeros((4, 12))[:, ::2].copy_(values)
    with pytest.raises(LayoutError, match=r"shape \(4, 6\) and strides \(12, 2\) overlaps or has gaps; code x.clone"):
        case.encode(spread)


def test_a_tensor_that_overlaps_itself_is_refused(case: Case) -> None:
    with pytest.raises(LayoutError, match=r"strides \(0, 1\) overlaps or has gaps"):
        case.encode(case.make((1, 6)).expand(4, 6))


def test_a_view_is_stored_without_the_rest_of_its_storage(case: Case) -> None:
    whole = case.make((8, 16, 25))
    alone = case.encode(whole[2:4].clone())
    encoded = case.encode(whole[2:4])
    assert encoded.to_bytes() == alone.to_bytes()
    assert encoded.nbytes == alone.nbytes
