"""``cast``: the error its docstring states, and what happens where the narrow type has no room."""

from __future__ import annotations

import math
import re

import pytest
import torch
from codec_cases import bit_equal, bits
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.codecs.cast import Cast
from lowtide.records import Encoded

TARGETS = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Half a unit in the last place of a significand of 8, 4 and 3 bits, relative to the power of two below the value.
ROUNDING = {"bf16": 2.0**-8, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}
WIDE = [torch.float32, torch.float64]


def scale_of(encoded: Encoded) -> float:
    return 2.0 ** int(encoded.tensors["exponent"])


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 7e4, 1e30])
def test_error_is_half_a_unit_of_the_target_or_half_its_smallest_step(
    to: str, scale: float, dtype: torch.dtype
) -> None:
    x = (torch.randn(4000, dtype=torch.float64) * scale * 10 ** (-6 * torch.rand(4000))).to(dtype)
    encoded = Cast(to).encode(x)
    error = (Cast(to).decode(encoded).double() - x.double()).abs()
    info = torch.finfo(TARGETS[to])
    smallest_step = info.smallest_normal * info.eps * scale_of(encoded)
    allowed = torch.maximum(x.double().abs() * ROUNDING[to], torch.tensor(smallest_step / 2, dtype=torch.float64))
    assert bool((error <= allowed).all())
    assert encoded.nbytes == x.numel() * TARGETS[to].itemsize + 4


def test_the_docstring_states_an_error_that_holds() -> None:
    """Its three figures, in order, against the worst value: just above a power of two plus half a unit."""
    stated = [2.0 ** -int(figure) for figure in re.findall(r"2\*\*-(\d+)", Cast.__doc__ or "")[:3]]
    assert len(stated) == 3
    for to, share in zip(TARGETS, stated, strict=True):
        x = torch.tensor([1 + ROUNDING[to], 1 + 3 * ROUNDING[to], 1.9])
        error = (Cast(to).decode(Cast(to).encode(x)).double() - x.double()).abs()
        assert bool((error <= x.double() * share).all()), f"{to}: stated {share} |x|, seen {(error / x).max().item()}"


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("peak", [5e-324, 1e-300, 1e-45, 1e-38, 1e38, 1e300])
def test_the_ends_of_float64_keep_their_relative_error(to: str, peak: float) -> None:
    """bf16 has float32's range: below it everything is rounded to zero, above it stored apart."""
    x = torch.tensor([peak, -peak / 2, 0.0], dtype=torch.float64)
    decoded = Cast(to).decode(Cast(to).encode(x))
    if to == "bf16" and peak < 1e-37:
        assert bool(((decoded - x).abs() <= 2.0**-134).all())
    else:
        assert bool(((decoded - x).abs() <= x.abs() * ROUNDING[to]).all())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("to", TARGETS)
def test_what_the_target_cannot_hold_is_restored_bit_for_bit(to: str, dtype: torch.dtype) -> None:
    x = torch.randn(100).to(dtype)
    x[[1, 50, 99]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    decoded = Cast(to).decode(Cast(to).encode(x))
    assert torch.equal(bits(decoded[~x.isfinite()]), bits(x[~x.isfinite()]))
    assert bool(decoded[x.isfinite()].isfinite().all())


def test_a_value_that_bf16_would_round_to_infinity_is_stored_apart() -> None:
    x = torch.tensor([1.0, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    encoded = Cast("bf16").encode(x)
    assert encoded.tensors["escape_index"].tolist() == [1, 2]
    assert bit_equal(Cast("bf16").decode(encoded), x)


@pytest.mark.parametrize("to", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_value_that_decodes_to_infinity_is_stored_apart(to: str, dtype: torch.dtype) -> None:
    """fp8 is scaled, so it holds the largest value rounded up to a power of two, which the wide dtype cannot."""
    x = torch.tensor([torch.finfo(dtype).max, 1.0, torch.finfo(dtype).min, torch.finfo(dtype).max / 2], dtype=dtype)
    encoded = Cast(to).encode(x)
    decoded = Cast(to).decode(encoded)
    assert encoded.tensors["escape_index"].tolist() == [0, 2]
    assert bit_equal(decoded[[0, 2]], x[[0, 2]])
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("values", [[], [0.0], [1.5, -300.0], [math.nan]])
def test_a_payload_has_the_same_parts_whatever_it_holds(to: str, values: list[float]) -> None:
    """bf16 is not scaled: its exponent is there and zero."""
    encoded = Cast(to).encode(torch.tensor(values))
    assert list(encoded.tensors) == ["values", "exponent", "escape_index", "escape_value"]
    dtypes = [part.dtype for part in encoded.tensors.values()]
    assert dtypes == [TARGETS[to], torch.int32, torch.int64, torch.float32]
    assert encoded.tensors["exponent"].numel() == 1
    assert to != "bf16" or encoded.tensors["exponent"].item() == 0


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("values", [[], [0.0, -0.0], [0.0, 5.0], [math.nan, math.inf], [math.nan, 0.0]])
def test_zeros_stay_zeros_and_nothing_else_is_needed(to: str, values: list[float]) -> None:
    x = torch.tensor(values)
    decoded = Cast(to).decode(Cast(to).encode(x))
    assert torch.equal(decoded == 0, x == 0)
    assert torch.equal(decoded.isnan(), x.isnan())


@pytest.mark.parametrize(
    ("to", "accepted"),
    [
        ("bf16", {torch.float32, torch.float64}),
        ("fp8_e4m3", {torch.float32, torch.float64, torch.float16, torch.bfloat16}),
        ("fp8_e5m2", {torch.float32, torch.float64, torch.float16, torch.bfloat16}),
    ],
)
def test_only_wider_floats_are_accepted(to: str, accepted: set[torch.dtype]) -> None:
    every = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool]
    assert {dtype for dtype in every if Cast(to).accepts(dtype)} == accepted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *WIDE], ids=str)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-36, 1e-30, 1e-4, 1.0, 5e4, 3e38, 1e300])
def test_without_a_wait_the_payload_is_the_same(to: str, dtype: torch.dtype, scale: float) -> None:
    """Where the device says that nothing has to be stored apart, a look at every value would have made the same."""
    codec = Cast(to)
    if not codec.accepts(dtype):
        pytest.skip("not wider than the target")
    x = (torch.randn(3000, dtype=torch.float64) * scale * 10 ** (-9 * torch.rand(3000))).to(dtype)
    ticket = torch.full((1,), -1)
    encoded = codec.encode(x, ticket=ticket)
    assert ticket.item() in (0, 1)
    settled, apart = codec.settle(encoded, x, int(ticket)), codec._encode_apart(x)
    assert (settled is encoded) is (ticket.item() == 0)
    assert list(settled.tensors) == list(apart.tensors)
    for part, expected in zip(settled.tensors.values(), apart.tensors.values(), strict=True):
        assert part.dtype == expected.dtype and bit_equal(part.view(torch.uint8), expected.view(torch.uint8))
    assert bit_equal(codec.decode(settled), codec.decode(apart))


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max])
def test_the_device_says_when_a_value_does_not_fit(to: str, value: float) -> None:
    x = torch.randn(1000)
    x[500] = value
    ticket = torch.full((1,), -1)
    encoded = Cast(to).encode(x, ticket=ticket)
    assert ticket.item() == 1
    decoded = Cast(to).decode(Cast(to).settle(encoded, x, 1))
    assert bit_equal(decoded[500:501], x[500:501]) and bool(decoded.isfinite().sum() >= 999)


class Passes(TorchDispatchMode):
    """Ops over whole tensors, and those whose result the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        given = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        made = [item for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor)]
        is_view = any(made_of.untyped_storage()._cdata == item.untyped_storage()._cdata
                      for made_of in given for item in made)  # fmt: skip
        is_made = name not in ("aten::new_empty", "aten::empty_like")
        if given and is_made and not is_view and max(item.numel() for item in given) > 1000:
            self.whole.append(name)
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"):
            self.waits.append(name)
        return result


@pytest.mark.parametrize(("to", "encoding", "decoding"), [("bf16", 2, 1), ("fp8_e4m3", 3, 2), ("fp8_e5m2", 3, 2)])
def test_few_passes_and_no_wait(to: str, encoding: int, decoding: int) -> None:
    """A look at every value takes 15 passes (bf16) or 27 (fp8), and a wait for how many do not fit."""
    x, ticket = torch.randn(8, 64, 16, 16).to(memory_format=torch.channels_last), torch.full((1,), -1)
    Cast(to).decode(Cast(to).encode(x))  # tables that are made once
    with Passes() as seen:
        encoded = Cast(to).encode(x, ticket=ticket)
    assert (len(seen.whole), seen.waits) == (encoding, [])
    with Passes() as seen:
        decoded = Cast(to).decode(encoded)
    assert (len(seen.whole), seen.waits) == (decoding, [])
    assert decoded.stride() == x.stride()


class Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1.0).square().sqrt().sum()


@pytest.mark.parametrize("to", TARGETS)
def test_in_training_what_does_not_fit_is_stored_apart(to: str) -> None:
    """Payloads are provisional until their tickets are read, and backward gets the final ones."""
    x = torch.randn(64, 64).abs() + 1
    x[3, 5] = math.inf
    x.requires_grad_()
    model = Squares()
    tide = lowtide.attach(model, "cast", to=to, min_size=64)
    model(x).backward()
    assert "cast" in {entry.codec for entry in tide.ledger.sites.values()}
    assert x.grad is not None and x.grad[3, 5].isnan(), "inf / inf, as in plain training"
    assert int(x.grad.isfinite().sum()) == x.numel() - 1
    tide.detach()
