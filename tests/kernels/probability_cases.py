"""Cases for the kernel that makes probabilities of log-probabilities, compared with plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.coding import layout, probabilities

UNIT = 2.0**-18
Case = tuple[str, Tensor, int | None]


def make_cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for shape in ((1,), (3, 7), (2, 1024), (5, 1025)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            y = torch.log_softmax(4 * torch.randn(shape, generator=generator), -1).to(dtype)
            for number in (None, 3, (1 << 33) + 5):
                yield f"{shape} {dtype}, number {number}", y, number
    odd = torch.tensor([0.0, -torch.inf, torch.nan, -200.0, torch.inf])
    yield "odd values", odd, None
    yield "channels last", torch.full((2, 40, 8, 8), -11.0).to(memory_format=torch.channels_last), None


def check(case: Case, device: torch.device) -> None:
    from lowtide.kernels import _probabilities_triton

    name, y, number = case
    shift = None if number is None else torch.tensor([number])
    expected = probabilities.rounded_of_logs(y, UNIT, 7, shift)
    there = None if shift is None else shift.to(device)
    got = _probabilities_triton.rounded_of_logs(y.to(device), UNIT, 7, there).cpu()
    assert got.dtype == torch.float32 and got.shape == y.shape and got.stride() == y.stride(), name
    got, expected = layout.memory_view(got), layout.memory_view(expected)
    same = (got == expected) | (got.isnan() & expected.isnan())
    # Exponentials may differ in their last bits, and then, where a fraction lies just between, a unit is had or not.
    apart = (got - expected)[~same].abs()
    assert bool((apart <= UNIT * 1.001 + 2e-7).all()), name
    assert int((~same).sum()) <= max(same.numel() // 250, 1), name
    small = expected < 2.0**-3
    assert int((~same & small).sum()) <= same.numel() // 1000, name
