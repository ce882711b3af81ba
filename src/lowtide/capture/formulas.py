"""How a tensor is made of others: a small tree of ops, what it gives, and how errors of its sources get through it.

| op | inputs | beside, exactly | squared slope |
|---|---|---|---|
| gelu, silu | a source | | f'(x)^2 |
| layer_norm, rms_norm | a source | statistics of rows, scale, shift | scale^2, of errors in units of a row's spread |
| group_norm | a source | statistics of groups, scale, shift | the same, of errors in units of a channel's spread |
| mul | a source or a formula | the other factor, which is broadcast | mean square of that factor |
| mul | two of: a source, gelu or silu of one | | square of the other one |
| attention | three sources | bias, mask | by trial (``attend.py``) |
| linear | a source | weight, bias | by trial, with what follows |
| chain | linear, layer_norm or rms_norm of a source | factors, what is added (``chains.py``) | by trial |

Trees are read off an autograd graph (``makers.py``), or off one that a compiler traces, and hold no tensors: sources
and what is read beside them go by numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.capture.attend import Attention
from lowtide.capture.chains import Chain
from lowtide.capture.sums import noise_like, working
from lowtide.kernels import _normalise

Parts = Sequence[Callable[[], Tensor]]  # tensors that are read exactly, when they are asked for


@dataclass(frozen=True, slots=True)
class Formula:
    """An op, and what it was applied to: sources by number, or what other formulas make.

    ``dtypes`` are those in which it read its inputs, ``shape`` is the one where changes of shape came in between.
    ``parts`` are numbers of tensors that it read besides (norms: mean, inverse spread, scale, shift; attention: bias;
    linear: weight, as it was multiplied by, and bias). ``option`` is GELU's approximation, ``attention`` what that op
    was told, ``chain`` what was done after the first op.
    """

    op: str
    inputs: tuple[Formula | int, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    parts: tuple[int | None, ...] = ()
    shape: tuple[int, ...] | None = None
    option: str = "none"
    attention: Attention | None = None
    chain: Chain | None = None

    @property
    def is_exact(self) -> bool:
        """Whether exact sources give the same bits as in forward: norms are made by another way than they were, and
        products with weights may be."""
        return self.op not in (*_NORMS, "linear") and all(
            part.is_exact for part in self.inputs if isinstance(part, Formula)
        )

    @property
    def keeps_order(self) -> bool:
        """Whether what it makes lies in memory as its sources do, if they are dense and lie alike, channels last or
        however: norms of rows, and factors that are broadcast, count on the last axis."""
        if self.op not in (*_FUNCTIONS, "group_norm") and (self.op != "mul" or self.parts or self.shape is not None):
            return False
        return self.chain is None and all(part.keeps_order for part in self.inputs if isinstance(part, Formula))

    def run(self, sources: Sequence[Tensor], parts: Parts, dtype: torch.dtype) -> Tensor:
        """What it makes of ``sources``, as they were stored, in ``dtype``."""
        given = [self._read(place, sources, parts) for place in range(len(self.inputs))]
        beside = [None if number is None else parts[number]() for number in self.parts]
        if self.attention is not None:
            query, key, value = given
            return self.attention.run(query, key, value, beside[0]).to(dtype)
        if self.chain is not None:
            return self.follow(given[0], parts).to(dtype)
        if self.op == "linear":
            weight, bias = beside
            assert weight is not None, "a product has two factors"
            return torch.mm(given[0], weight) if bias is None else torch.addmm(bias, given[0], weight)
        if self.op in _NORMS:
            mean, inverse_std, scale, shift = beside
            assert inverse_std is not None, "no norm without it"
            if self.op == "group_norm":
                assert mean is not None and scale is not None and shift is not None, "others are not made again"
                return _normalise.groups(given[0], mean, inverse_std, scale, shift, dtype)
            return _normalise.rows(given[0], mean, inverse_std, scale, shift, dtype)
        if self.op == "mul":
            factor = given[1] if len(given) > 1 else beside[0]
            assert factor is not None, "a product has two factors"
            return (given[0] * factor).to(dtype)
        return _FUNCTIONS[self.op](given[0], self.option).to(dtype)

    def begin(self, sources: Sequence[Tensor], parts: Parts) -> Tensor:
        """What a chain begins with, which may be shared with others."""
        return self._read(0, sources, parts)

    def follow(self, first: Tensor, parts: Parts) -> Tensor:
        """The rest of a chain."""
        assert self.chain is not None, "asked of chains only"
        return self.chain.run(first, parts)

    def trial(self, like: Tensor, profile: Tensor | None, parts: Parts, *, even: bool) -> Tensor:
        """What a chain makes of the variance of errors of its source, ``like``; ``profile``: how they differ in size
        from feature to feature. ``even``: as for ``gains``."""
        first = self.inputs[0]
        assert self.chain is not None and isinstance(first, Formula), "a chain begins with an op"
        noise = noise_like(like)
        if profile is not None:
            noise = noise * profile
        if first.op == "linear":
            weight = parts[first.parts[0]]()  # type: ignore[index]
            made = torch.mm(noise.to(weight.dtype), weight)
        else:
            inverse_std, scale = first.parts[1], first.parts[2]
            made = noise if scale is None else noise * parts[scale]()
            if even:
                made = made * parts[inverse_std]()  # type: ignore[index]
        made = self.chain.run(made.to(self.dtypes[0]), parts, constants=False)
        return made.to(working(made)).square().mean()

    def profile(self, parts: Parts) -> Tensor | None:
        """By how much errors in what this makes differ from feature to feature, in the mean square 1; None if alike."""
        if self.chain is not None:
            return None  # features may be anywhere
        if self.op == "group_norm":
            return None  # they are not the last axis
        number = self.parts[2] if self.op in _NORMS else self.parts[0] if self.op == "mul" and self.parts else None
        scale = parts[number]() if number is not None else None
        if scale is None or scale.dim() != 1:
            return None
        scale = scale.to(working(scale))
        return scale / scale.square().mean().sqrt().clamp(min=1e-20)

    def _read(self, place: int, sources: Sequence[Tensor], parts: Parts) -> Tensor:
        """An input, as the op has read it."""
        item = self.inputs[place]
        if isinstance(item, int):
            return sources[item]
        made = item.run(sources, parts, self.dtypes[place])
        return made if self.shape is None else made.reshape(self.shape)

    def gains(self, samples: Sequence[Tensor], parts: Parts, *, even: bool = False) -> list[Tensor]:
        """Mean squares of the slopes, source by source: what multiplies the variance of an error on the way.

        ``samples`` are parts of the sources, all of the same places; for attention, the sources themselves. ``even``:
        errors of what a norm has read are of one size, and no multiples of each row's spread.
        """
        if self.attention is not None:
            bias = None if self.parts[0] is None else parts[self.parts[0]]()
            query, key, value = (samples[item] for item in self.inputs if isinstance(item, int))
            return self.attention.gains(query, key, value, bias)
        wide = [sample.to(working(sample)) for sample in samples]
        squares = self._squares(wide, parts)
        if even and self.op in _NORMS:
            rows = _mean_square(parts[self.parts[1]]())  # type: ignore[index]
            squares = {number: square * rows for number, square in squares.items()}
        return [squares[number].mean() if number in squares else wide[0].new_zeros(()) for number in range(len(wide))]

    def _squares(self, samples: Sequence[Tensor], parts: Parts) -> dict[int, Tensor]:
        """Squared slopes, value by value or in the mean, by source."""
        one = samples[0].new_ones(())
        inner = [{item: one} if isinstance(item, int) else item._squares(samples, parts) for item in self.inputs]
        if len(inner) == 2:
            values = [self._sample(item, samples) for item in self.inputs]
            found: dict[int, Tensor] = {}
            for squares, other in zip(inner, reversed(values), strict=True):
                for number, square in squares.items():
                    found[number] = found.get(number, 0) + square * other.square()
            return found
        if self.op in _SLOPES:
            slope = _SLOPES[self.op](self._sample(self.inputs[0], samples)).square()
        else:
            scale = self.parts[2] if self.op in _NORMS else self.parts[0]
            slope = one if scale is None else _mean_square(parts[scale]())
        return {number: square * slope for number, square in inner[0].items()}

    def _sample(self, item: Formula | int, samples: Sequence[Tensor]) -> Tensor:
        """What an input is at the places of the samples."""
        if isinstance(item, int):
            return samples[item]
        source = item.inputs[0]
        assert isinstance(source, int) and item.op in _FUNCTIONS, "inner factors are functions of one source"
        return _FUNCTIONS[item.op](samples[source], item.option)


_NORMS = ("layer_norm", "rms_norm", "group_norm")
_FUNCTIONS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "gelu": lambda x, option: F.gelu(x, approximate=option),
    "silu": lambda x, _: F.silu(x),
}


def gelu_slope(x: Tensor) -> Tensor:
    """Phi(x) + x phi(x); the tanh form differs from it by less than a hundredth."""
    return torch.special.ndtr(x) + x * torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5


def silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {"gelu": lambda x: gelu_slope(x), "silu": lambda x: silu_slope(x)}


def _mean_square(x: Tensor) -> Tensor:
    return x.to(working(x)).square().mean()
