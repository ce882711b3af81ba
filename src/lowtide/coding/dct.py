"""The cosine transform of planes in blocks of 8 x 8, and the order in which its coefficients are coded.

The transform is orthonormal: an error in the coefficients has the same energy in the values, and independent errors
without bias stay so. A plane whose sides are no multiples of 8 ends in shorter transforms, of 1 to 7 values: nothing is
padded, and a plane has as many coefficients as values. Coefficient k of n has frequency 8 k // n, by which it finds its
place in a table of 8 x 8.

A sum is taken in the order of its terms, each product and each sum rounded: every device finds the same coefficients.

Coefficients of like frequency are coded together, in four bands of diagonals: those of a band have similar sizes, and
in the last ones most are zero.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

SIDE = 8
_DIAGONALS = (range(0, 1), range(1, 3), range(3, 7), range(7, 15))  # bands: sums of the two frequencies


def forward(planes: Tensor) -> Tensor:
    """(n, height, width) values to coefficients."""
    return _along_rows(_along_rows(planes, inverse=False).transpose(1, 2), inverse=False).transpose(1, 2)


def inverse(coefficients: Tensor) -> Tensor:
    return _along_rows(_along_rows(coefficients, inverse=True).transpose(1, 2), inverse=True).transpose(1, 2)


def frequencies(size: int) -> Tensor:
    """Of the coefficients along an axis of this size."""
    whole = size // SIDE * SIDE
    place = torch.arange(size)
    return torch.where(place < whole, place % SIDE, (place - whole) * SIDE // max(size - whole, 1))


def spread(table: Tensor, height: int, width: int) -> Tensor:
    """A table of 8 x 8 over a plane: to each coefficient its entry."""
    return table[frequencies(height)][:, frequencies(width)]


@cache
def bands(height: int, width: int) -> tuple[Tensor, ...]:
    """The coefficients of a plane, by band: indices, those of a diagonal together."""
    diagonal = (frequencies(height).unsqueeze(1) + frequencies(width)).flatten()
    order = diagonal.argsort(stable=True)
    ranks = diagonal[order]
    return tuple(order[(ranks >= band.start) & (ranks < band.stop)] for band in _DIAGONALS)


def weights(size: int, *, inverse: bool) -> Tensor:
    """Row k has what each input counts for in output k of a transform of ``size`` values (float64)."""
    return _basis(size).T if inverse else _basis(size)


def _along_rows(x: Tensor, *, inverse: bool) -> Tensor:
    whole = x.shape[2] // SIDE * SIDE
    parts = []
    for part, size in ((x[:, :, :whole], SIDE), (x[:, :, whole:], x.shape[2] - whole)):
        if part.shape[2]:
            blocks = part.unflatten(2, (-1, size))
            matrix = weights(size, inverse=inverse).to(dtype=x.dtype, device=x.device)
            total = blocks[..., :1] * matrix[:, 0]
            for term in range(1, size):
                total += blocks[..., term : term + 1] * matrix[:, term]
            parts.append(total.flatten(2))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


@cache
def _basis(size: int) -> Tensor:
    """Row k is the cosine of frequency k, of length 1."""
    k, n = torch.arange(size).double().unsqueeze(1), torch.arange(size).double()
    basis = torch.cos(math.pi * (2 * n + 1) * k / (2 * size)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis
