"""A codec that breaks its word is caught, by name, with what was promised and what was seen."""

from __future__ import annotations

import math
import re

import pytest
import torch
from codec_cases import lay_out
from torch import Tensor

from lowtide.codecs import Codec, create
from lowtide.errors import BoundViolationError
from lowtide.records import Bound
from lowtide.witness import SAMPLES, Witness

CHECKS = [True, "full"]
SITE = "layer1.0.conv:Convolution.input"
LARGE = 3 * SAMPLES + 1


def summon(x: Tensor, codec: Codec, bound: Bound | None, check: bool | str) -> tuple[Witness, Tensor]:
    """A witness for ``x`` and what an honest decoder gives."""
    witness = Witness.of(x, codec, bound, check)
    assert witness is not None
    return witness, codec.decode(codec.encode(x, bound))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("count", [1, 500, LARGE])
def test_an_honest_codec_passes(check: bool | str, count: int) -> None:
    x = torch.randn(count)
    x[::50] = math.nan
    x[1::70] = -math.inf
    for codec, bound in [(create("sz"), Bound.absolute(0.01)), (create("identity"), None)]:
        witness, decoded = summon(x, codec, bound, check)
        witness.examine(decoded, SITE)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("count", [500, LARGE])
def test_an_error_beyond_the_bound_is_told_with_site_promise_and_sight(check: bool | str, count: int) -> None:
    x = torch.randn(count)
    witness, decoded = summon(x, create("sz"), Bound.absolute(0.01), check)
    decoded[0] = x[0] + 0.125  # the first and the last element are always among the samples
    decoded[-1] = x[-1] - 0.5
    with pytest.raises(BoundViolationError, match=rf"^{re.escape(SITE)}: promised .* <= 0\.01, saw 0\.5") as caught:
        witness.examine(decoded, SITE)
    assert (caught.value.site, caught.value.promised) == (SITE, 0.01)
    assert caught.value.seen == pytest.approx(0.5, rel=1e-6)


def test_only_a_full_check_sees_between_the_samples() -> None:
    """Three elements for every sample: the second is not looked at."""
    x = torch.randn(LARGE)
    for check in CHECKS:
        witness, decoded = summon(x, create("sz"), Bound.absolute(0.01), check)
        decoded[1] += 1
        if check == "full":
            with pytest.raises(BoundViolationError, match="promised"):
                witness.examine(decoded, SITE)
        else:
            witness.examine(decoded, SITE)


def test_samples_are_spread_over_the_whole_and_few() -> None:
    witness = Witness.of(torch.randn(10 * SAMPLES), create("identity"), None, True)
    assert witness is not None and witness.index is not None
    assert witness.saved.numel() == SAMPLES
    assert (int(witness.index[0]), int(witness.index[-1])) == (0, 10 * SAMPLES - 1)
    assert int(witness.index.diff().min()) >= 9 and int(witness.index.diff().max()) <= 11


def test_the_witness_keeps_no_hold_on_the_tensor() -> None:
    for count in (10, LARGE):
        x = torch.randn(count)
        witness, decoded = summon(x, create("identity"), None, True)
        x.zero_()
        witness.examine(decoded, SITE)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("saved", "decoded"),
    [
        (math.nan, 0.0),
        (0.0, math.nan),
        (math.nan, math.inf),
        (math.inf, 1e38),
        (math.inf, -math.inf),
        (1.0, math.inf),
        (-math.inf, math.nan),
    ],
)
def test_what_is_not_finite_must_stay_as_it_was(check: bool | str, saved: float, decoded: float) -> None:
    x = torch.randn(100)
    x[7] = saved
    for codec, bound in [(create("sz"), Bound.absolute(1e30)), (create("identity"), None)]:
        witness, back = summon(x, codec, bound, check)
        witness.examine(back, SITE)
        back[7] = decoded
        with pytest.raises(BoundViolationError, match=re.escape(SITE)):
            witness.examine(back, SITE)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_every_element_is_held_to_its_own_bound(check: bool | str, order: tuple[int, ...]) -> None:
    """Row 1 of three may be off by one, the others by a hundredth."""
    x = lay_out(torch.randn(2, 3, 5), order)
    bound = Bound.absolute([0.01, 1.0, 0.01], (1,))
    witness, decoded = summon(x, create("sz"), bound, check)
    decoded[:, 1] = x[:, 1] + 0.9
    witness.examine(decoded, SITE)
    decoded[1, 2, 4] = x[1, 2, 4] + 0.02
    with pytest.raises(BoundViolationError, match=r"<= 0\.01, saw 0\.0(2|19999)"):
        witness.examine(decoded, SITE)


def test_the_bound_itself_is_still_kept() -> None:
    witness = Witness.of(torch.tensor([1.0, 2.0]), create("sz"), Bound.absolute(0.5), True)
    assert witness is not None
    witness.examine(torch.tensor([1.5, 1.5]), SITE)
    with pytest.raises(BoundViolationError, match=r"promised .* <= 0\.5, saw 0\.5000"):
        witness.examine(torch.nextafter(torch.tensor([1.5, 1.5]), torch.tensor([2.0, 0.0])), SITE)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("count", [100, LARGE])
def test_a_mask_that_changes_class_is_caught(check: bool | str, count: int) -> None:
    x = torch.randn(count)
    witness, decoded = summon(x, create("bitmask", test="not_le", params=(0.0,)), None, check)
    witness.examine(decoded, SITE)
    decoded[0] = 1 - decoded[0]
    with pytest.raises(BoundViolationError, match=rf"^{re.escape(SITE)} \(class of element\): .* <= 0, saw 1\."):
        witness.examine(decoded, SITE)


@pytest.mark.parametrize("check", CHECKS)
def test_a_boolean_mask_that_changes_is_caught(check: bool | str) -> None:
    x = torch.randn(100) > 0
    witness, decoded = summon(x, create("bitmask"), None, check)
    witness.examine(decoded, SITE)
    decoded[3:5].logical_not_()
    with pytest.raises(BoundViolationError, match=r"class of element\): .* saw 2\."):
        witness.examine(decoded, SITE)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["window_index", "identity"])
def test_an_index_off_by_one_is_caught(check: bool | str, name: str) -> None:
    x = torch.randint(0, 1 << 20, (2, 3, 50))
    witness, decoded = summon(x, create(name), None, check)
    witness.examine(decoded, SITE)
    decoded[0, 0, 0] += 1
    with pytest.raises(BoundViolationError, match=rf"^{re.escape(SITE)}: promised .* <= 0, saw 1\."):
        witness.examine(decoded, SITE)


def test_an_index_too_large_for_float64_is_still_compared_exactly() -> None:
    x = torch.tensor([1 << 53])
    witness, decoded = summon(x, create("window_index"), None, True)
    with pytest.raises(BoundViolationError, match="promised"):
        witness.examine(decoded + 1, SITE)


def test_complex_values_are_compared_in_both_parts() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    witness, decoded = summon(x, create("identity"), None, True)
    witness.examine(decoded, SITE)
    with pytest.raises(BoundViolationError, match="promised"):
        witness.examine(decoded + 1j, SITE)


@pytest.mark.parametrize("name", ["cast", "shape"])
def test_nothing_is_promised_nothing_is_kept(name: str) -> None:
    assert Witness.of(torch.randn(10), create(name), None, "full") is None
