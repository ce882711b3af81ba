"""Tensors that can be made again in backward from what the ops that made them have saved themselves: their inputs.

GELU saves what it reads, and the linear layer after it saves what GELU made; a layer norm and the layer after it
likewise; a product saves its factors, and the layer after it the product. What was made need not be stored. An RMS norm
that is written out is two products, of which all that is needed is the norm's input and one number a row.

What is made again from stored inputs carries their errors through the ops: GELU multiplies them by 1.13 at most, SiLU
by 1.1, a product by the other factor. A norm is made with the statistics of the exact input, which are kept anyway:
each value's error is that of the input, divided by its row's spread, times the scale.

Where a user asks for it, what linear layers have made of such tensors is made again, too, and what of that was divided,
turned, scaled or added up: queries, keys and values, the inputs of GELU and of gates. It costs their products once
more, about as long as coding what they have made takes. A row of theirs mixes the errors of a row of the input.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import bounds
from lowtide.capture import attend, attention, chains, identity
from lowtide.capture.chains import Part
from lowtide.capture.formulas import Formula
from lowtide.capture.handles import Alias, Handle, Passed, Recast
from lowtide.capture.sharding import has_memory
from lowtide.coding import layout
from lowtide.records import Kind, TensorSpec

# Changes of shape, and slices: of the whole, or the number of values tells.
_VIEWS = frozenset(f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Slice", "Alias"))
_CAST = "ToCopyBackward0"
_TURNS = frozenset(("TransposeBackward0", "PermuteBackward0"))
_MOST_STEPS = 6  # views and casts on the way to an op
_MOST_OPS = 4  # one after the other
_MOST_LAYERS = 2  # whose products are run again for one tensor, one after the other

_PRODUCTS = {"AddmmBackward0": "mat1", "MmBackward0": "self"}
_SHARED = "lowtide.shared"

Owned = Handle | Passed | Recast


class Shared:
    """What several chains begin with: a layer's result, of which queries, keys and values are parts. The first one
    that needs it makes it, and the last one that asks is given it, if all ask on one stream."""

    __slots__ = ("__weakref__", "_left", "_lent", "users")

    def __init__(self) -> None:
        self.users = 0  # how many tensors are not stored because of it
        self._left = 0
        self._lent: tuple[int, Tensor] | None = None

    def take(self, stream: int) -> Tensor | None:
        lent = self._lent
        if lent is None or lent[0] != stream:
            return None
        self._left -= 1
        if not self._left:
            self._lent = None
        return lent[1]

    def lend(self, stream: int, tensor: Tensor) -> None:
        self._left = self.users - 1
        self._lent = (stream, tensor) if self._left else None


@dataclass(frozen=True, slots=True)
class Maker:
    """How a tensor is made again: ``formula``, of ``sources``, which are stored or made again themselves, and
    ``parts``, which are kept; ``layers`` are run again on the way, one after the other. Of chains, ``spec`` is how the
    tensor lay in memory, ``shared`` what they begin with."""

    formula: Formula
    sources: tuple[Handle, ...]
    parts: tuple[Owned, ...]
    layers: int = 0
    spec: TensorSpec | None = None
    shared: Shared | None = None

    @property
    def is_chain(self) -> bool:
        return self.formula.chain is not None

    @property
    def op(self) -> str:
        return self.formula.op

    @property
    def is_exact(self) -> bool:
        """Whether exact sources give the same bits as in forward."""
        return self.formula.is_exact

    @property
    def has_parts(self) -> bool:
        """Whether all that is read beside the sources will be there as it was."""
        return all(type(part) is not Handle or _is_kept(part) for part in self.parts)

    @property
    def beside(self) -> list[Callable[[], Tensor]]:
        return [part.restore for part in self.parts]

    def run(self, sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return self.formula.run(sources, self.beside, dtype)

    def begin(self, sources: Sequence[Tensor]) -> Tensor:
        """What a chain begins with."""
        return self.formula.begin(sources, self.beside)

    def follow(self, first: Tensor, dtype: torch.dtype) -> Tensor:
        """The rest of it."""
        return self.formula.follow(first, self.beside).to(dtype)

    def gains(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """The mean square of the slope, by source, from what is stored: the variance of an error is multiplied by it
        on the way. A norm's source, if it is stored, has errors in units of its row's spread."""
        inner = maker_of(self.sources[0])
        if self.is_chain:
            profile = inner.formula.profile(inner.beside) if inner is not None else None
            return [self.formula.trial(stored[0], profile, self.beside, even=inner is not None)]
        if self.formula.attention is not None:
            return self.formula.gains(stored, self.beside)
        first = stored[0]
        samples = [bounds.sample(x if x.shape == first.shape else x.view(first.shape), ()) for x in stored]
        return self.formula.gains(samples, self.beside, even=inner is not None)


class Origin(NamedTuple):
    """A stored tensor that another one is made of, in one step or several, and what becomes of its error's variance."""

    handle: Handle
    stored: Tensor
    gain: Tensor


def maker_of(handle: Handle) -> Maker | None:
    """How what was saved will be made again, or is: None if it is stored."""
    maker = handle.entry.maker if handle.entry is not None else None
    if maker is None:
        maker = getattr(handle.kept, "maker", None)
    return maker if isinstance(maker, Maker) else None


def origins(handle: Handle) -> list[Origin]:
    """What is stored for a tensor that is made again. Errors that come by several ways are added up."""
    maker = maker_of(handle)
    if maker is None:
        return []
    stored = [source.restore() for source in maker.sources]
    found: dict[int, Origin] = {}
    for source, tensor, gain in zip(maker.sources, stored, maker.gains(stored), strict=True):
        for origin in origins(source) or [Origin(source, tensor, gain.new_ones(()))]:
            key = id(origin.handle.entry) if origin.handle.entry is not None else id(origin.handle)
            total = origin.gain * gain
            before = found.get(key)
            found[key] = origin._replace(gain=total if before is None else before.gain + total)
    return list(found.values())


def find(tensor: Tensor, *, sharded: bool = False, products: bool = False) -> Maker | None:
    """How ``tensor`` can be made again: with nothing but casts and changes of shape between the ops that made it.

    ``sharded``: weights may be without their memory when the tensor is asked for, since that is another layer's turn.
    ``products``: linear layers may be run again, and what is done to their results.
    """
    name = type(tensor.grad_fn).__name__  # of most tensors one that is not worth a look
    if name in _KNOWN:
        walk = Walk(_is_handle, _is_owned, _is_intact)
        formula = walk.behind(tensor.grad_fn)
        maker = make(formula, walk.sources, walk.parts, tensor, sharded=sharded) if formula is not None else None
        if maker is not None:
            return maker
    return _find_chain(tensor) if products and not sharded and name in _CHAINED else None


def _find_chain(tensor: Tensor) -> Maker | None:
    walk = Walk(_is_handle, _is_owned, _is_intact)
    found = walk.chain_behind(tensor)
    if found is None:
        return None
    formula, first = found
    return make_chain(formula, walk.sources, walk.parts, tensor, _shared(first))


def make_chain(
    formula: Formula, sources: Sequence[Handle], parts: Sequence[Owned], tensor: Tensor, shared: Shared
) -> Maker | None:
    """The maker of ``tensor``, by a chain; None where a norm at its beginning has not read rows that lie in a row, or
    where there are layers enough on the way already."""
    (source,) = sources
    if tensor._version or source.spec.device != tensor.device:
        return None
    if formula.op != "linear" and not layout.is_contiguous(source.spec):
        return None
    layers = _layers(sources) + (formula.op == "linear")
    if layers > _MOST_LAYERS:
        return None
    return Maker(formula, tuple(sources), tuple(parts), layers, TensorSpec.of(tensor), shared)


def _layers(sources: Sequence[Handle]) -> int:
    """How many layers are run again for what was saved, one after the other."""
    return max(0 if maker is None else maker.layers for maker in map(maker_of, sources))


def _shared(node: Any) -> Shared:
    known = node.metadata.get(_SHARED)
    shared = known() if known is not None else None
    if shared is None:
        shared = Shared()
        node.metadata[_SHARED] = weakref.ref(shared)
    return shared


def make(
    formula: Formula, sources: Sequence[Handle], parts: Sequence[Owned], tensor: Tensor, *, sharded: bool = False
) -> Maker | None:
    """The maker of ``tensor``, by a formula and what it reads; None where values would lie in another order."""
    if tensor._version or not _fits(formula, [each.spec for each in sources], tensor):
        return None
    if sharded:
        weights = [part for part in parts if type(part) is not Handle]
        if not all(has_memory(part.restore()) for part in weights):
            return None
        parts = [part if type(part) is Handle else Passed(part.restore().clone(), part.call_path) for part in parts]
    return Maker(formula, tuple(sources), tuple(parts), _layers(sources))


def makes_output(node: Any) -> bool:
    """Whether the output of ``node``, which is attention, is to be made again of what else it has saved."""
    output = _saved(node, "output")
    maker = output.entry.maker if type(output) is Handle and output.entry is not None else None
    return isinstance(maker, Maker) and maker.formula.attention is not None


def _fits(formula: Formula, sources: Sequence[TensorSpec], tensor: Tensor) -> bool:
    """Whether what it makes has as many values as the tensor, and in the same order: sources lie as the tensor does,
    value for value."""
    if formula.attention is not None:
        return tensor.is_contiguous() and formula.attention.fits(sources, tensor)
    if any(source.device != tensor.device for source in sources):
        return False
    shape, stride = tuple(tensor.shape), tensor.stride()
    if tensor.is_contiguous():
        if formula.keeps_order:  # the halves of a gate come back packed, or are by the op
            sources = [_packed(source) for source in sources]
        return all(source.numel == tensor.numel() and layout.is_contiguous(source) for source in sources)
    alike = all(source.shape == shape and source.stride == stride for source in sources)
    return alike and formula.keeps_order and layout.is_dense(shape, stride)


def _packed(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape, layout.dense_stride(spec.shape, spec.stride), spec.dtype, spec.device)


def _is_kept(part: Handle) -> bool:
    return type(part.kept) is Alias or (part.need is not None and part.need.kind is Kind.EXACT)


def _is_handle(data: Any) -> bool:
    return type(data) is Handle


def _is_owned(data: Any) -> bool:
    return isinstance(data, Owned)


def _is_intact(data: Any) -> bool:
    return type(data) is not Handle or data.entry is None or not data.entry.version


class Walk:
    """Reads a formula off an autograd graph. ``sources`` and ``parts`` are what its numbers stand for: whatever hooks
    have left in the graph in place of a saved tensor, if ``is_source`` or ``is_part`` says that it may be one.
    ``is_intact`` says whether a tensor that was saved on the way, if it was, is what its op has made."""

    def __init__(
        self, is_source: Callable[[Any], bool], is_part: Callable[[Any], bool], is_intact: Callable[[Any], bool]
    ) -> None:
        self.is_source, self.is_part, self.is_intact = is_source, is_part, is_intact
        self.sources: list[Any] = []
        self.parts: list[Any] = []

    def behind(self, node: Any, most: int = _MOST_OPS) -> Formula | None:
        """The formula of what ``node`` gives, or what it is a view or a cast of.

        What attention has made may have been turned: it lies in memory as it does behind that, as a rule.
        """
        casts, is_turned, result = 0, False, -1  # an op's own saves of what it makes come first: it is not complete yet
        for _ in range(_MOST_STEPS):
            name = type(node).__name__
            if name in attention.NODES:
                return self.read(name, node, most) if most == _MOST_OPS and not casts and result == 0 else None
            if name in _READERS:
                return self.read(name, node, most) if not is_turned else None
            casts += name == _CAST
            is_turned = is_turned or name in _TURNS
            if node is None or casts > 1 or (name != _CAST and name not in _TURNS and name not in _VIEWS):
                return None
            node, result = node.next_functions[0]
        return None

    def read(self, name: str, node: Any, most: int) -> Formula | None:
        """The formula of one op by the name of its node."""
        sources, parts = len(self.sources), len(self.parts)
        formula = _READERS[name](self, node, most)
        if formula is None:
            del self.sources[sources:], self.parts[parts:]
        return formula

    def chain_behind(self, tensor: Tensor) -> tuple[Formula, Any] | None:
        """A linear layer or a norm, and what only moves, scales and adds up its result; and the layer's node."""
        found = chains.read(self, tensor.grad_fn, tensor.output_nr)
        if found is None:
            return None
        first, chain = found
        name = type(first).__name__
        inner = self._linear(first) if name in _PRODUCTS else self.read(name, first, 0)
        if inner is None:
            return None
        return Formula(inner.op, (inner,), (first._input_metadata[0].dtype,), chain=chain), first

    def _linear(self, node: Any) -> Formula | None:
        """A product with a weight, whose gradient needs what it was multiplied by."""
        bias: Part | None = None
        if type(node).__name__ == "AddmmBackward0":
            bias = self.parameter(node.next_functions[0][0])
            if bias is None or node._saved_alpha != 1 or node._saved_beta != 1:
                return None
        source, weight = self.source(_saved(node, _PRODUCTS[type(node).__name__])), self.part(_saved(node, "mat2"))
        if source is None or weight is None:
            return None
        return Formula("linear", (source,), parts=(weight, None if bias is None else bias.number))

    def begins(self, node: Any) -> bool:
        """As chains ask: at a product with a weight, or at a norm."""
        return type(node).__name__ in _BEGINNINGS

    def constant(self, node: Any, field: str) -> Part | complex | None:
        """As chains ask: what has no gradient, or a number."""
        data = _saved(node, field)
        if isinstance(data, Tensor):  # no hook was told: of numbers torch saves a tensor of its own, on the host
            number: complex | None = data.item() if not data.dim() and data.device.type == "cpu" else None
            return number
        part = self.part(data)
        return None if part is None else Part(part)

    def parameter(self, node: Any) -> Part | None:
        """As chains ask: a parameter that no op has saved, or the cast of one."""
        dtype = node._input_metadata[0].dtype if type(node).__name__ == _CAST else None
        part = self.part(self.leaf(node if dtype is None else node.next_functions[0][0], dtype))
        return None if part is None else Part(part)

    def leaf(self, node: Any, dtype: torch.dtype | None) -> Any:
        """The parameter that gradients end in at ``node``, in ``dtype``; None if it is no such node."""
        parameter = identity.parameter_behind(node) if type(node).__name__ == "AccumulateGrad" else None
        if parameter is None:
            return None
        return Passed(parameter, "") if dtype is None else Recast(parameter, dtype, "", is_turned=False)

    def source(self, data: Any) -> int | None:
        return _number(self.sources, data) if self.is_source(data) else None

    def part(self, data: Any) -> int | None:
        return _number(self.parts, data) if self.is_part(data) else None


def _number(known: list[Any], data: Any) -> int:
    """Of ``data`` among those that are known, which it joins if it is new."""
    for number, item in enumerate(known):
        if item is data:
            return number
    known.append(data)
    return len(known) - 1


def _saved(node: Any, field: str) -> Any:
    """What hooks have left in place of a tensor that the node saved."""
    return getattr(node, f"_raw_saved_{field}").data


def _function(op: str) -> Reader:
    def read(walk: Walk, node: Any, most: int) -> Formula | None:
        source = walk.source(_saved(node, "self"))
        return None if source is None else Formula(op, (source,), option=getattr(node, "_saved_approximate", "none"))

    return read


def _norm(op: str, mean: str, inverse_std: str, shift: str) -> Reader:
    """By the fields that have them; an RMS norm has no mean and no shift."""

    def read(walk: Walk, node: Any, most: int) -> Formula | None:
        source = walk.source(_saved(node, "input"))
        fields = (mean, inverse_std, "weight", shift)
        parts = tuple(walk.part(_saved(node, field)) if field else None for field in fields)
        if source is None or parts[1] is None or (mean and parts[0] is None):
            return None
        return Formula(op, (source,), parts=parts)

    return read


def _group_norm(walk: Walk, node: Any, most: int) -> Formula | None:
    """Its shift is saved by nobody: it has to be a parameter that is trained, or it might as well be another tensor."""
    source = walk.source(_saved(node, "input"))
    parts = [walk.part(_saved(node, field)) for field in ("result1", "result2", "weight")]
    bias = node.next_functions[2][0]
    shift = walk.parameter(bias) if bias is not None else None
    if source is None or shift is None or None in parts:
        return None
    return Formula("group_norm", (source,), parts=(*parts, shift.number))


def _attention(walk: Walk, node: Any, most: int) -> Formula | None:
    saved, output = [_saved(node, field) for field in attend.FIELDS], _saved(node, "output")
    if not all(map(walk.is_source, saved)) or not (walk.is_source(output) or walk.is_part(output)):
        return None
    known = attend.Attention.of(node, saved[0].spec, saved[1].spec, output.spec)
    bias = next((_saved(node, field) for field in attention.BIASES if hasattr(node, f"_raw_saved_{field}")), None)
    if known is None or (bias is not None and not walk.is_part(bias)):
        return None
    sources = tuple(walk.source(each) for each in saved)
    return Formula("attention", sources, parts=(walk.part(bias),), attention=known)  # type: ignore[arg-type]


def _product(walk: Walk, node: Any, most: int) -> Formula | None:
    """A factor that was broadcast is kept, and the other one may have been made by a product again; of two that are
    as large as the product, both have to be stored, or to be functions of what is stored."""
    shape = tuple(node._input_metadata[0].shape)
    factors = [_saved(node, "self"), _saved(node, "other")]
    for place, factor in enumerate(factors):
        if walk.is_part(factor) and _is_spread(tuple(factor.spec.shape), shape):
            return _scaled(walk, node, 1 - place, factors, most)
    if not all(walk.is_source(factor) and _are_same(tuple(factor.spec.shape), shape) for factor in factors):
        return None
    inputs, dtypes = [], []
    for place, factor in enumerate(factors):
        maker = node.next_functions[place][0]
        name = type(maker).__name__
        inner = walk.read(name, maker, 0) if name in _FUNCTIONS and walk.is_intact(factor) else None
        source = walk.source(factor) if inner is None else inner
        assert source is not None, "looked at above"
        inputs.append(source)
        dtypes.append(factor.spec.dtype)
    return Formula("mul", tuple(inputs), tuple(dtypes))


def _scaled(walk: Walk, node: Any, place: int, factors: Sequence[Any], most: int) -> Formula | None:
    """Factor ``place``, which may not have been saved, times the other one."""
    factor, (maker, output) = factors[place], node.next_functions[place]
    if maker is None:
        return None
    inner = walk.behind(maker, most - 1) if most > 1 and walk.is_intact(factor) else None
    source = walk.source(factor) if inner is None else inner
    if source is None:
        return None
    seen = maker._input_metadata[output]
    if _is_spread(tuple(seen.shape), tuple(node._input_metadata[0].shape)):
        return None
    shape = tuple(seen.shape) if type(maker).__name__ in _VIEWS | {_CAST} else None
    if shape is not None and not all(type(size) is int for size in shape):
        return None  # a size that is not known before a graph runs
    return Formula("mul", (source,), (seen.dtype,), (walk.part(factors[1 - place]),), shape)


def _is_spread(shape: tuple[Any, ...], over: tuple[Any, ...]) -> bool:
    """Whether a factor of ``shape`` is broadcast to ``over``; asks nothing of sizes that are not known yet."""
    if len(shape) != len(over):
        return len(shape) < len(over)
    return any(type(a) is int and a == 1 and not (type(b) is int and b == 1) for a, b in zip(shape, over, strict=True))


def _are_same(shape: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(shape) == len(other) and all(str(a) == str(b) for a, b in zip(shape, other, strict=True))


Reader = Callable[[Walk, Any, int], Formula | None]
_FUNCTIONS = frozenset(("GeluBackward0", "SiluBackward0"))
_READERS: dict[str, Reader] = {
    "GeluBackward0": _function("gelu"),
    "SiluBackward0": _function("silu"),
    "NativeLayerNormBackward0": _norm("layer_norm", "result1", "result2", "bias"),
    "FusedRmsNormBackward0": _norm("rms_norm", "", "result1", ""),
    "NativeGroupNormBackward0": _group_norm,
    "MulBackward0": _product,
    **dict.fromkeys(attention.NODES, _attention),
}
_KNOWN = frozenset((*_READERS, *_VIEWS, _CAST))
_BEGINNINGS = frozenset((*_PRODUCTS, "NativeLayerNormBackward0", "FusedRmsNormBackward0"))
_CHAINED = chains.ENDS | _PRODUCTS.keys()
