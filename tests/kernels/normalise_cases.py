"""Cases for the kernel that applies a norm with given statistics, compared with plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.kernels import _normalise

Case = tuple[str, Tensor, torch.dtype, bool, bool, bool]
_TOLERANCE = {
    torch.float32: 2e-6,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}  # rounded once, maybe the other way


def make_cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for count, length in ((1, 1), (3, 7), (9, 64), (33, 768), (5, 1025), (2, 8192)):
        for source, target in (
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
        ):
            x = (3 * torch.randn(count, length, generator=generator) + 1).to(source)
            for given in ((True, True, True), (True, True, False), (True, False, False), (False, True, False)):
                yield f"{count}x{length} {source} to {target}, mean, weight, bias {given}", x, target, *given


def check(case: Case, device: torch.device) -> None:
    from lowtide.kernels import _normalise_triton

    name, x, target, has_mean, has_weight, has_bias = case
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(x.shape[1], generator=generator).to(x.dtype) for _ in range(2))
    mean = x.float().mean(1) if has_mean else None
    inverse_std = (x.float().var(1, correction=0) + 1e-5).rsqrt()
    parts = (mean, inverse_std, weight if has_weight else None, bias if has_bias else None)
    expected = _expected(x, *parts, target)
    there = [None if part is None else part.to(device) for part in parts]
    got = _normalise_triton.rows(x.to(device), *there, target).cpu()
    assert got.dtype == target and got.shape == x.shape, name
    limit = _TOLERANCE[target] * expected.double().abs().clamp(min=1)
    assert bool(((got.double() - expected.double()).abs() <= limit).all()), name
    assert _normalise.rows(x, *parts, target).dtype == target, name


def _expected(
    x: Tensor,
    mean: Tensor | None,
    inverse_std: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    made = x.double() if mean is None else x.double() - mean.double()[:, None]
    made = made * inverse_std.double()[:, None]
    made = made if weight is None else made * weight.double()
    return (made if bias is None else made + bias.double()).to(dtype)
