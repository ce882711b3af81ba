"""Ops that only move, scale and add up numbers, between a product with a weight (or a norm) and what is saved later.

Queries, keys and values are such: a linear layer's result, divided into heads, turned, perhaps rotated by the place in
the sequence. So is what GELU reads. They follow from the layer's input, and are linear in it: what an error of that
input becomes is found by sending noise the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lowtide.capture.graph import saved_dim, signed

_MOST = 48  # ops; a rotation of queries has some fifteen
_NO_END = 1 << 62

Parts = Sequence[Callable[[], Tensor]]  # tensors that are read exactly, when they are asked for


class Part(NamedTuple):
    """A tensor that is read beside, by its number."""

    number: int


class Step(NamedTuple):
    """An op by its name, which of the values so far it reads, and what it was told."""

    op: str
    reads: tuple[int, ...]
    told: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps, each of which adds a value; the first value is given, the last one is the result."""

    steps: tuple[Step, ...]

    def run(self, first: Tensor, parts: Parts, *, constants: bool = True) -> Tensor:
        """Without ``constants`` nothing is added but what comes of ``first``: it is linear then."""
        values = [first]
        for step in self.steps:
            given = [values[number] for number in step.reads]
            if step.op == "plus" and not constants:
                values.append(given[0].expand(step.told[2]))  # the parameter may have been the larger one
            else:
                values.append(_RUN[step.op](given, step.told, parts))
        return values[-1]


class Reader(Protocol):
    """What reads formulas off a graph: where a chain begins, and which tensors are read beside."""

    def begins(self, node: Any) -> bool: ...

    def constant(self, node: Any, field: str) -> Part | complex | None:
        """A saved tensor to which no gradient leads, or a number."""
        ...

    def parameter(self, node: Any) -> Part | None:
        """The parameter, or its cast, that ``node`` takes gradients to."""
        ...


class _NotAChainError(Exception):
    """Some op on the way is none that only moves, scales and adds up, or two chains meet."""


def read(reader: Reader, node: Any, result: int) -> tuple[Any, Chain] | None:
    """The node that a chain begins with, and what leads from its result to result ``result`` of ``node``."""
    tracing = _Tracing(reader)
    try:
        last = tracing.number(node, result)
    except _NotAChainError:
        return None
    steps = tuple(tracing.steps)
    if last != len(steps):
        return None
    return tracing.first, Chain(steps)


class _Tracing:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.first: Any = None
        self.steps: list[Step] = []
        self._known: dict[tuple[Any, int], int] = {}

    def number(self, node: Any, result: int) -> int:
        """Of the value that is result ``result`` of ``node``, which is worked out first if it is new."""
        found = self._known.get((node, result))
        if found is not None:
            return found
        if node is None or len(self._known) > _MOST:
            raise _NotAChainError
        if self.reader.begins(node):
            if self.first is not None or result:
                raise _NotAChainError
            self.first, number = node, 0
        else:
            read = _READ.get(type(node).__name__)
            if read is None:
                raise _NotAChainError
            self.steps.append(read(self, node, result))
            number = len(self.steps)
        self._known[node, result] = number
        return number

    def given(self, node: Any, place: int = 0) -> int:
        """The number of what the op has read at ``place``."""
        return self.number(*node.next_functions[place])


Read = Callable[[_Tracing, Any, int], Step]


def _whole(op: str, told: Callable[[Any], tuple[Any, ...]] = lambda node: ()) -> Read:
    """An op with one input, and what it was told by fields of its node."""
    return lambda tracing, node, result: Step(op, (tracing.given(node),), told(node))


def _part(told: Callable[[Any, int], tuple[int, int, int]]) -> Read:
    """One of the parts that an op divides its input into: axis, beginning, length."""
    return lambda tracing, node, result: Step("narrow", (tracing.given(node),), told(node, result))


def _shape(node: Any) -> tuple[Any, ...]:
    return (tuple(node._input_metadata[0].shape),)


def _section(node: Any, result: int) -> tuple[int, int, int]:
    dim, size = saved_dim(node), int(node._saved_split_size)
    whole = int(node._saved_self_sym_sizes[dim])
    return dim, result * size, min(size, whole - result * size)


def _section_by_sizes(node: Any, result: int) -> tuple[int, int, int]:
    sizes = [int(size) for size in node._saved_split_sizes]
    return saved_dim(node), sum(sizes[:result]), sizes[result]


def _rolled(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(signed(shift) for shift in node._saved_shifts), tuple(signed(dim) for dim in node._saved_dims)


def _slice(node: Any) -> tuple[int, int, int, int]:
    end = _NO_END if node._saved_end is None else min(signed(node._saved_end), _NO_END)
    return saved_dim(node), signed(node._saved_start or 0), end, int(node._saved_step)


def _factor(op: str) -> Read:
    """A product with a tensor, or a quotient by one, to which no gradient leads."""

    def read(tracing: _Tracing, node: Any, result: int) -> Step:
        edges = [edge for edge, (behind, _) in enumerate(node.next_functions) if behind is not None]
        if len(edges) != 1 or (op == "over" and edges != [0]):
            raise _NotAChainError
        constant = tracing.reader.constant(node, "self" if edges[0] else "other")
        if constant is None:
            raise _NotAChainError
        return Step(op, (tracing.given(node, edges[0]),), (constant,))

    return read


def _sum(sign: int) -> Read:
    """A sum of two values, or of one and a parameter."""

    def read(tracing: _Tracing, node: Any, result: int) -> Step:
        if getattr(node, "_saved_alpha", 1) != 1:
            raise _NotAChainError
        for edge in (1, 0) if sign > 0 else (1,):
            parameter = tracing.reader.parameter(node.next_functions[edge][0])
            if parameter is not None:
                return Step("plus", (tracing.given(node, 1 - edge),), (parameter, sign, *_shape(node)))
        return Step("sum", (tracing.given(node, 0), tracing.given(node, 1)), (sign,))

    return read


def _several(op: str) -> Read:
    """Several inputs along an axis."""
    return lambda tracing, node, result: Step(
        op, tuple(tracing.given(node, place) for place in range(len(node.next_functions))), (saved_dim(node),)
    )


_READ: Mapping[str, Read] = {
    **dict.fromkeys(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"), _whole("reshape", _shape)),
    **dict.fromkeys((f"SqueezeBackward{kind}" for kind in range(3)), _whole("reshape", _shape)),
    "UnsqueezeBackward0": _whole("reshape", _shape),
    "AliasBackward0": _whole("same"),
    "CloneBackward0": _whole("same"),
    "ExpandBackward0": _whole("expand", _shape),
    "TBackward0": _whole("transpose", lambda node: (0, 1)),
    "TransposeBackward0": _whole("transpose", lambda node: (signed(node._saved_dim0), signed(node._saved_dim1))),
    "PermuteBackward0": _whole("permute", lambda node: (tuple(signed(dim) for dim in node._saved_dims),)),
    "RollBackward0": _whole("roll", _rolled),
    "SelectBackward0": _whole("select", lambda node: (saved_dim(node), signed(node._saved_index))),
    "SliceBackward0": _whole("slice", _slice),
    "SplitBackward0": _part(_section),
    "SplitWithSizesBackward0": _part(_section_by_sizes),
    "UnbindBackward0": lambda tracing, node, result: Step("select", (tracing.given(node),), (saved_dim(node), result)),
    "ToCopyBackward0": _whole("cast", lambda node: (node._input_metadata[0].dtype,)),
    "NegBackward0": _whole("negative"),
    "MulBackward0": _factor("times"),
    "MulBackward1": _whole("times", lambda node: (node._saved_other,)),
    "DivBackward0": _factor("over"),
    "DivBackward1": _whole("over", lambda node: (node._saved_other,)),
    "AddBackward0": _sum(1),
    "SubBackward0": _sum(-1),
    "CatBackward0": _several("cat"),
    "StackBackward0": _several("stack"),
}


def _value(told: Part | complex, parts: Parts) -> Any:
    return parts[told.number]() if isinstance(told, Part) else told


ENDS = frozenset(_READ)  # what a tensor at the end of a chain may have been made by

_RUN: dict[str, Callable[[list[Tensor], tuple[Any, ...], Parts], Tensor]] = {
    "same": lambda x, told, parts: x[0],
    "reshape": lambda x, told, parts: x[0].reshape(told[0]),
    "expand": lambda x, told, parts: x[0].expand(told[0]),
    "transpose": lambda x, told, parts: x[0].transpose(*told),
    "permute": lambda x, told, parts: x[0].permute(told[0]),
    "roll": lambda x, told, parts: x[0].roll(*told),
    "select": lambda x, told, parts: x[0].select(*told),
    "slice": lambda x, told, parts: torch.ops.aten.slice(x[0], *told),
    "narrow": lambda x, told, parts: x[0].narrow(*told),
    "cast": lambda x, told, parts: x[0].to(told[0]),
    "negative": lambda x, told, parts: -x[0],
    "times": lambda x, told, parts: x[0] * _value(told[0], parts),
    "over": lambda x, told, parts: x[0] / _value(told[0], parts),
    "plus": lambda x, told, parts: torch.add(x[0], _value(told[0], parts), alpha=told[1]),
    "sum": lambda x, told, parts: torch.add(x[0], x[1], alpha=told[0]),
    "cat": lambda x, told, parts: torch.cat(x, told[0]),
    "stack": lambda x, told, parts: torch.stack(x, told[0]),
}
