"""Ops whose backward asks for a bit or two of each element, over every value that a half-precision number can have.

A gate is stored as a class, and backward gets a stand-in for it. That the stand-in takes the branch of the original is
checked here for all 65 536 patterns of bfloat16 and float16 (NaN, infinities, both zeros and subnormals among them),
and for the neighbours of every limit in float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from networks import Apply
from torch import Tensor
from train import assert_bit_equal, codecs_of

import lowtide

Gate = Callable[[Tensor], Tensor]

# Half precision has neither: bfloat16 rounds the first down and the second up, float16 the other way round.
LIMITS = (0.7, 0.1)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

GATES: dict[str, Gate] = {
    "relu": F.relu,
    "relu, in place": lambda x: F.relu(x, inplace=True),
    "relu6": F.relu6,
    "relu6, in place": lambda x: F.relu6(x, inplace=True),
    "leaky_relu": F.leaky_relu,
    "leaky_relu, in place": lambda x: F.leaky_relu(x, inplace=True),
    "leaky_relu, negative slope": lambda x: F.leaky_relu(x, -0.5),
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "abs": torch.abs,
    "softsign": F.softsign,
    "where": lambda x: torch.where(x > 0.1, x, 0.1 * x),
    "product with a float mask": lambda x: x * (x > 0.1).to(x.dtype),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp, unbounded": lambda x: x.clamp(-float("inf"), float("inf")),
    "threshold": lambda x: F.threshold(x, 0.5, 0.25),
}
LIMITED: dict[str, Gate] = {}
for limit in LIMITS:
    LIMITED |= {
        f"threshold {limit}": lambda x, c=limit: F.threshold(x, c, 0.25),
        f"threshold -{limit}, in place": lambda x, c=limit: F.threshold(x, -c, 0.25, inplace=True),
        f"hardtanh within {limit}": lambda x, c=limit: F.hardtanh(x, -c, c),
        f"hardtanh from {limit}": lambda x, c=limit: F.hardtanh(x, c, 2 * c),
        f"clamp within {limit}": lambda x, c=limit: x.clamp(-c, c),
        f"clamp above {limit}": lambda x, c=limit: x.clamp_min(c),
        f"clamp below -{limit}": lambda x, c=limit: x.clamp(max=-c),
        f"clamp to nothing {limit}": lambda x, c=limit: x.clamp(c, -c),
        f"hardshrink {limit}": lambda x, c=limit: F.hardshrink(x, c),
        f"softshrink {limit}": lambda x, c=limit: F.softshrink(x, c),
    }


def every_value(dtype: torch.dtype) -> Tensor:
    """All values of a half-precision dtype; of a larger one, all of bfloat16 and the neighbours of the limits."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    if dtype.itemsize == 2:
        return patterns.view(dtype)
    limits = torch.tensor([sign * limit for limit in (*LIMITS, 1, 3, 6) for sign in (1, -1)], dtype=dtype)
    beside = [torch.nextafter(limits, limits + step) for step in (-1, 1)]
    return torch.cat([patterns.view(torch.bfloat16).to(dtype), limits, *beside])


def differentiate(gate: Gate, values: Tensor, *, attach: bool) -> tuple[dict[str, Tensor], set[str]]:
    """Output and gradient, with a clone before the gate so that it may work in place and does not see an input."""
    model = Apply(lambda m, x: gate(x.clone()))
    session = lowtide.attach(model, "exact", min_size=64, check=True) if attach else None
    x = values.clone().requires_grad_()
    output = model(x)
    output.backward(torch.randn(values.shape, generator=torch.Generator().manual_seed(3)).to(values.dtype))
    assert x.grad is not None
    return {"output": output.detach(), "gradient": x.grad}, codecs_of(session) if session else set()


def assert_same_branches(gate: Gate, values: Tensor) -> set[str]:
    expected, _ = differentiate(gate, values, attach=False)
    got, coded = differentiate(gate, values, attach=True)
    assert_bit_equal(got, expected)
    return coded


def show(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=show)
@pytest.mark.parametrize("name", GATES)
def test_gates_take_the_branch_of_every_finite_value(name: str, dtype: torch.dtype) -> None:
    values = every_value(dtype)
    coded = assert_same_branches(GATES[name], values[values.isfinite()])
    assert "bitmask" in coded, "the test is empty unless the gate is stored as a mask"


@pytest.mark.parametrize("dtype", DTYPES, ids=show)
@pytest.mark.parametrize("name", LIMITED)
def test_limits_that_half_precision_rounds(name: str, dtype: torch.dtype) -> None:
    """Backward compares with the limit in float32, so a mask must not compare with the rounded limit."""
    values = every_value(dtype)
    coded = assert_same_branches(LIMITED[name], values[values.isfinite()])
    assert "bitmask" in coded or dtype.itemsize == 2 or "nothing" in name


# At NaN torch's own kernels differ between their vectorised part and their scalar tail, so there is no one branch.
UNSETTLED = ("relu6", "relu6, in place", "hardtanh", "hardshrink", "softshrink")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=show)
@pytest.mark.parametrize("name", GATES)
def test_nan_and_infinity_take_their_branch(name: str, dtype: torch.dtype) -> None:
    """100 elements, so that NaN is met by the vectorised part of torch's loops and by their scalar tail."""
    special = 1.25 if name in UNSETTLED else float("nan")
    values = torch.tensor([special, 1.5, float("inf"), 0.3, -float("inf"), -2.0, 0.0, -0.0, 7.0, 0.05], dtype=dtype)
    assert_same_branches(GATES[name], values.repeat(10))


MASKS = {
    "zeros and ones": (0.0, 1.0),
    "inverted dropout": (0.0, 1 / 0.7),
    "ones": (1.0, 1.0),
    "zeros": (0.0, 0.0),
    "negative": (0.0, -1.0),
    "three values": (0.0, 1.0, 2.0),
    "subnormal": (0.0, 1e-40),
    "infinite": (0.0, float("inf")),
    "not a number": (0.0, 1.0, float("nan")),
    "negative zero": (-0.0, 1.0),
    "both zeros": (-0.0, 0.0, 1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=show)
@pytest.mark.parametrize("name", MASKS)
def test_products_with_float_masks(name: str, dtype: torch.dtype) -> None:
    """A factor of zeros and one other value is a bit each; the gradient of the other factor has its signs too."""
    mask = torch.tensor(MASKS[name], dtype=dtype).repeat(50)
    values = torch.linspace(-3, 3, len(mask)).to(dtype)
    coded = assert_same_branches(lambda x: x * mask, values)
    assert "bitmask" in coded or name not in ("zeros and ones", "inverted dropout")
