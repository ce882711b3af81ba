"""How attention's gradients react to errors in what it saved.

Backward rebuilds the probabilities from stored queries and keys and from exact sums (flash attention and its kin):

    P = exp(scale q k^T - sums)    dP = gY v^T    dS = P * (dP - rowsum(gY * out))
    gQ = scale dS k                gK = scale dS^T q        gV = P^T gY

An error in k or q multiplies every probability by the exponential of an error in its score, which grows with the
lengths of queries and keys: the sharper attention is, the finer they have to be stored. No sum of squares gives what
that does to gQ, gK and gV, so it is tried: on some rows of some samples backward is computed twice, with values as they
are and with small random errors in one of the four tensors. S is the worst of the three gradients, as a share of its
own energy.

Where probabilities themselves are stored (softmax), S is the sum over rows of |g - s|^2 + |y|^2 |g|^2, s = g . y.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.capture import needs
from lowtide.capture.graph import saved_dim
from lowtide.capture.sums import Arrived, noise_like, norm, square, working

Grads = Sequence[Tensor | None]
Measure = Callable[[Grads, Arrived], Tensor]

NODES = tuple(
    f"ScaledDotProduct{kind}Backward0"
    for kind in ("FlashAttention", "FlashAttentionForCpu", "EfficientAttention", "CudnnAttention")
)
_OPS = frozenset(needs.snake(needs.op_of(node)) for node in NODES)
BIASES = ("attn_mask", "attn_bias")  # the fields of masks and biases
_FIELDS = ("query", "key", "value", "output")
_ENTRIES = 1 << 21  # scores that are looked at, at most: a few of these are held at a time
_SAMPLES = 2
_TRIED = 1e-4  # variance of a score's error that is tried: far from where the exponential bends


def is_attention(op: str, field: str) -> bool:
    return op in _OPS and field in _FIELDS


def edge_of(node: Any) -> int:
    """An input whose gradient is wanted."""
    return next((edge for edge in range(3) if node.next_functions[edge][0] is not None), 0)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Part:
    """Some rows of some samples, as they were saved; one for the four tensors of an op."""

    saved: Mapping[str, Tensor]
    scale: float
    rows: slice
    hidden: Tensor | None  # scores that are masked out
    bias: Tensor | None

    def at_work(self) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors in a working precision, and the logarithms of the sums of each row."""
        saved = {field: x.to(working(x)) for field, x in self.saved.items()}
        sums = self._scores(saved["query"], self._spread(saved["key"])).logsumexp(-1, keepdim=True)
        return saved, torch.where(sums.isfinite(), sums, torch.inf)  # where nothing is seen there are no probabilities

    def gradients(self, gy: Tensor, saved: Mapping[str, Tensor], sums: Tensor, again: bool = False) -> list[Tensor]:
        """What backward makes of values that may have errors, together with the sums, which have none.

        ``again``: the output is made of these values."""
        query, key, value = saved["query"], self._spread(saved["key"]), self._spread(saved["value"])
        chances = torch.exp(self._scores(query, key) - sums)
        output = self.output(saved) if again else saved["output"]
        slope = chances * (gy @ value.mT - (gy * output).sum(-1, keepdim=True))
        found = [slope @ key * self.scale, slope.mT @ query * self.scale, chances.mT @ gy]
        return [found[0], *(part.unflatten(1, (saved["key"].shape[1], -1)).sum(2) for part in found[1:])]

    def output(self, saved: Mapping[str, Tensor]) -> Tensor:
        chances = self._scores(saved["query"], self._spread(saved["key"])).softmax(-1)
        return chances.nan_to_num_(0.0) @ self._spread(saved["value"])  # of rows that see nothing: zero

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT * self.scale
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        return scores if self.hidden is None else scores.masked_fill_(self.hidden, -torch.inf)

    def _spread(self, x: Tensor) -> Tensor:
        """Heads of keys or values, each for as many heads of queries as share it."""
        groups = self.saved["query"].shape[1] // x.shape[1]
        return x if groups == 1 else x.repeat_interleave(groups, 1)


_RECENT: weakref.WeakValueDictionary[tuple[int, int], _Part] = weakref.WeakValueDictionary()


def measure_attention(node: Any, field: str, *, again: bool = False) -> Measure | None:
    """None where something that the formula needs is not to be had.

    ``again``: the output is not stored but made of the other three, so that it has no error of its own.
    """
    if again and field == "output":
        return None
    key = threading.get_ident(), node._sequence_nr()
    found = _RECENT.get(key) or _part_of(node)
    if found is None:
        return None
    part = _RECENT[key] = found
    edge = edge_of(node)

    def measure(grads: Grads, arrived: Arrived) -> Tensor:
        outgoing = grads[edge]
        assert outgoing is not None, "the formula is not asked without it"
        saved, sums = part.at_work()
        x = saved[field]
        gy = arrived.gradient[: x.shape[0], :, part.rows].to(x.dtype)
        spread = _spread_to_try(saved, field, part.scale)
        errors = noise_like(x)
        exact = part.gradients(gy, saved, sums)
        tried = part.gradients(gy, {**saved, field: torch.addcmul(x, errors, spread)}, sums, again)
        shares = [square(b - a) / square(a).clamp(min=1e-30) for a, b in zip(exact, tried, strict=True)]
        wanted = [share for share, grad in zip(shares, grads[:3], strict=True) if grad is not None]
        return torch.stack(wanted).amax() / spread.square() * square(outgoing)

    return measure


def slopes(saved: Mapping[str, Tensor], scale: float | None, *, is_causal: bool, bias: Tensor | None) -> list[Tensor]:
    """The variance of the output's error for one of variance one in queries, keys and values, tried in turn."""
    part = _cut(saved, scale, is_causal=is_causal, bias=bias)
    assert part is not None, "what made an output has made it of something"
    wide = {field: x.to(working(x)) for field, x in part.saved.items()}
    exact, found = part.output(wide), []
    for field, x in wide.items():
        spread = _spread_to_try(wide, field, part.scale)
        error = part.output({**wide, field: torch.addcmul(x, noise_like(x), spread)}) - exact
        found.append(square(error) / (error.numel() * spread.square()))
    return found


def measure_softmax(node: Any, y: Tensor) -> Measure:
    """For stored probabilities, from some of their rows. Zeros have no error."""
    dim = saved_dim(node)
    step = max(1, y.numel() // _ENTRIES)
    part = _rows(y, dim, step).to(working(y), copy=True)
    rows = y.numel() // max(y.shape[dim], 1)

    def measure(grads: Grads, arrived: Arrived) -> Tensor:
        g = _rows(arrived.gradient, dim, step).to(part.dtype)
        g = torch.where(part == 0, 0, g)
        centred = torch.where(part == 0, 0, g - (g * part).sum(-1, keepdim=True))
        return (square(centred, -1) + square(part, -1) * square(g, -1)).sum() * (rows / max(part.shape[0], 1))

    return measure


def _rows(x: Tensor, dim: int, step: int) -> Tensor:
    """One in ``step`` of the rows along ``dim``, without a copy of the others where that can be."""
    turned = x.movedim(dim, -1)
    if turned.dim() > 2 and turned.shape[0] >= step > 1:
        return turned[::step].reshape(-1, turned.shape[-1])
    return turned.reshape(-1, turned.shape[-1])[::step]


def _part_of(node: Any) -> _Part | None:
    found: dict[str, Tensor] = {field: getattr(node, f"_saved_{field}").detach() for field in _FIELDS}
    bias = next((getattr(node, f"_saved_{name}", None) for name in BIASES if hasattr(node, f"_saved_{name}")), None)
    return _cut(found, node._saved_scale, is_causal=node._saved_is_causal, bias=bias)


def _cut(found: Mapping[str, Tensor], scale: float | None, *, is_causal: bool, bias: Tensor | None) -> _Part | None:
    """Some rows of some samples; None where tensors are not as the formulas have them."""
    if any(x.is_nested or x.dim() != 4 or not x.numel() for x in found.values()):
        return None
    (batch, heads, length, size), (_, shared, keys, _) = found["query"].shape, found["key"].shape
    if heads % shared or found["value"].shape[1] != shared:
        return None
    samples = max(1, min(_SAMPLES, batch, _ENTRIES // (heads * length * keys)))
    rows = slice(None, None, max(1, -(-samples * heads * length * keys // _ENTRIES)))
    cut = {"query": rows, "output": rows}
    part = {field: x[:samples, :, cut.get(field, slice(None))].clone() for field, x in found.items()}
    hidden = _hidden(length, keys, rows, found["query"].device) if is_causal else None
    bias = _cut_bias(bias, samples, rows, length)
    if bias is not None and bias.dtype == torch.bool:
        hidden, bias = (~bias if hidden is None else hidden | ~bias), None
    return _Part(part, float(scale) if scale is not None else 1 / math.sqrt(size), rows, hidden, bias)


def _cut_bias(bias: Tensor | None, samples: int, rows: slice, length: int) -> Tensor | None:
    """What is added to scores, or which of them count."""
    if bias is None or not bias.numel():
        return None
    if bias.dim() == 4 and bias.shape[0] > 1:
        bias = bias[:samples]
    return (bias[..., rows, :] if bias.dim() > 1 and bias.shape[-2] == length > 1 else bias).clone()


def _hidden(length: int, keys: int, rows: slice, device: torch.device) -> Tensor:
    """What comes later, for rows that are some of ``length``; torch counts both from the first."""
    return torch.arange(length, device=device)[rows, None] < torch.arange(keys, device=device)


def _spread_to_try(saved: Mapping[str, Tensor], field: str, scale: float) -> Tensor:
    """The standard deviation of errors that are tried. Where S does not depend on it, any will do."""
    other = saved.get({"query": "key", "key": "query"}.get(field, ""))
    if other is None:
        x = saved[field]
        return norm(x).div_(math.sqrt(x.numel())).clamp_(min=1e-20)
    length = norm(other).div_(math.sqrt(other.numel() / other.shape[-1]))
    return math.sqrt(_TRIED) / length.mul_(abs(scale)).clamp_(min=1e-20)
