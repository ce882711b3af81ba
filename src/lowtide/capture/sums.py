"""Sums of squares and counts, without copies of what they are taken of: each is one look at the tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SEED = 0x5EA0F10DE
_NARROW = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

Axes = int | tuple[int, ...]


def working(x: Tensor) -> torch.dtype:
    """Sums are taken in float32 at least."""
    return _NARROW.get(x.dtype, x.dtype)


def norm(x: Tensor, dim: Axes | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, 2, dim, dtype=working(x))


def square(x: Tensor, dim: Axes | None = None) -> Tensor:
    """Sum of squares along ``dim``."""
    return norm(x, dim).square_()


def count_nonzero(x: Tensor, dim: Axes | None = None) -> Tensor:
    """Number of non-zeros along ``dim``, as floats."""
    return torch.linalg.vector_norm(x, 0, dim, dtype=working(x))


def noise_like(x: Tensor) -> Tensor:
    """Errors as dither makes them, of variance one. The same draw every time, and nobody else's: values may have been
    drawn from a seed that users choose."""
    generator = torch.Generator(x.device).manual_seed(_SEED)
    return torch.empty_like(x).uniform_(-math.sqrt(3), math.sqrt(3), generator=generator)


class Arrived:
    """A gradient that arrived at a node; formulas that ask for the same sums of its squares share them.

    Where errors of the tensor that the node saved have different variances, the gradient is that times the roots of
    them, and ``evenness`` is their mean by channel.
    """

    __slots__ = ("_dim", "_squares", "_total", "evenness", "gradient")

    def __init__(self, gradient: Tensor, evenness: Tensor | None = None) -> None:
        self.gradient = gradient
        self.evenness = evenness
        self._dim: Axes | None = None
        self._squares: Tensor | None = None  # along _dim
        self._total: Tensor | None = None

    def felt(self, variances: Tensor) -> Arrived:
        """The same gradient where errors have these variances; channels are the second axis."""
        rest = tuple(axis for axis in range(variances.dim()) if axis != 1)
        return Arrived(self.gradient * variances.sqrt(), variances.mean(rest))

    def squares(self, dim: Axes) -> Tensor:
        """Sums along ``dim``."""
        if self._squares is None or self._dim != dim:
            self._dim, self._squares = dim, square(self.gradient, dim)
        return self._squares

    def squares_by_group(self, groups: int) -> Tensor:
        """Sums over the channels of each group: (batch, groups, *positions)."""
        if groups == 1:
            return self.squares(1).unsqueeze(1)
        self._dim, self._squares = None, square(self.gradient.unflatten(1, (groups, -1)), 2)
        return self._squares

    def square(self) -> Tensor:
        """The whole sum: of the sums that are known, if any are."""
        if self._total is None:
            self._total = square(self.gradient) if self._squares is None else self._squares.sum()
        return self._total
