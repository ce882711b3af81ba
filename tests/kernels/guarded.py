"""Memory with words behind it that nobody may write."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_WORDS = [0x5AFE5AFE] * 64


class Guarded:
    """Stands in for torch in a module under test: what its ``empty`` gives is filled with ones, and guarded."""

    def __init__(self) -> None:
        self._guards: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int | tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        guard = torch.tensor(_WORDS, dtype=torch.int32, device=device).view(torch.uint8)
        shape = (size,) if isinstance(size, int) else size
        nbytes = math.prod(shape) * dtype.itemsize
        whole = torch.cat([torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device), guard])
        self._guards.append(whole[nbytes:])
        return whole[:nbytes].view(dtype).view(shape)

    def empty_strided(
        self, shape: tuple[int, ...], stride: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self.empty(math.prod(shape), dtype=dtype, device=device).as_strided(shape, stride)

    def check(self) -> None:
        for guard in self._guards:
            assert bytes(guard.tolist()) == b"".join(word.to_bytes(4, "little") for word in _WORDS), "past the end"
