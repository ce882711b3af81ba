"""The codecs without arithmetic: ``identity`` keeps every bit, ``shape`` keeps none and says so."""

from __future__ import annotations

import math

import pytest
import torch
from codec_cases import DTYPES, bit_equal, same_geometry
from torch import Tensor

from lowtide.codecs import create


def every_bit_pattern(dtype: torch.dtype) -> Tensor:
    """Random bytes seen as ``dtype``: NaN payloads, subnormals, both zeros."""
    if dtype == torch.bool:
        return torch.rand(999) < 0.5
    return torch.randint(0, 256, (999 * dtype.itemsize,), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identity_keeps_every_bit(dtype: torch.dtype) -> None:
    x = every_bit_pattern(dtype)
    encoded = create("identity").encode(x)
    assert encoded.nbytes == x.nbytes
    assert bit_equal(create("identity").decode(encoded), x)


def test_identity_lets_go_of_the_rest_of_a_storage() -> None:
    whole = torch.randn(1000, 1000)
    assert create("identity").encode(whole[17]).nbytes == 4000


@pytest.mark.parametrize("poison", [False, True])
def test_shape_stores_nothing(poison: bool) -> None:
    codec = create("shape", poison=poison)
    x = torch.randn(3, 5, 7).permute(2, 0, 1)
    encoded = codec.encode(x)
    assert (encoded.nbytes, dict(encoded.tensors)) == (0, {})
    assert same_geometry(codec.decode(encoded), x)
    assert encoded.meta == {"poison": poison}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_is_seen_by_whoever_reads_it(dtype: torch.dtype) -> None:
    codec = create("shape", poison=True)
    decoded = codec.decode(codec.encode(torch.zeros(4, 3).to(dtype)))
    if dtype.is_floating_point or dtype.is_complex:
        assert bool(decoded.to(torch.complex64).isnan().all())
    else:
        largest = True if dtype == torch.bool else torch.iinfo(dtype).max
        assert bool((decoded == largest).all())


def test_a_poisoned_read_turns_the_gradient_into_nan() -> None:
    codec = create("shape", poison=True)
    x = torch.randn(5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(codec.encode, codec.decode):
        loss = (x * x).sum()
    loss.backward()
    assert x.grad is not None and all(math.isnan(value) for value in x.grad.tolist())
