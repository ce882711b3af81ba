"""Find out which op saved what, from the autograd graph itself.

A pack hook is not told the op it runs for. But the graph knows: every node exposes what it saved, and for a tensor
that went through our hook that is our own handle. So a save is held back until a later save (or the module's output)
leads to its node, which is one op later as a rule; then the node says its name, its field and its scalars.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch


def next_sequence_nr() -> int:
    """The number that the next node of this thread will have; nodes made from here on have at least this one."""
    return int(torch.autograd._get_sequence_nr())


@cache
def saved_fields(node_type: type) -> tuple[tuple[str, str], ...]:
    """The fields that nodes of a type save tensors in, each with the attribute that shows what is in it."""
    prefix = "_raw_saved_"
    return tuple((name.removeprefix(prefix), name) for name in dir(node_type) if name.startswith(prefix))


def saved_by(node: Any) -> Iterator[tuple[str, Any]]:
    """What hooks made of each tensor that ``node`` saved, by field (``tensors[0]`` for the fields that are lists)."""
    node_type: type = type(node)
    for field, attribute in saved_fields(node_type):
        raw = getattr(node, attribute)
        if type(raw) is list or type(raw) is tuple:
            for index, item in enumerate(raw):
                if item is not None:
                    yield f"{field}[{index}]", item.data
        elif raw is not None:
            yield field, raw.data


def saved_dim(node: Any) -> int:
    """The axis that ``node`` works along; torch shows a negative one as an unsigned number."""
    return signed(node._saved_dim)


def signed(number: Any) -> int:
    """A number that torch may show as an unsigned one."""
    number = int(number)
    return number - (1 << 64) if number >= 1 << 63 else number


_MARK = "lowtide.visited"
_scopes = itertools.count()


class Walker:
    """Visits each node of one forward's graph once, as later tensors make it reachable.

    A visited node carries a mark in its own metadata: sequence numbers repeat across threads, and keeping the nodes
    would keep the graph alive.
    """

    def __init__(self) -> None:
        self._start = next_sequence_nr()
        self._number = next(_scopes)

    def visit(self, roots: Iterable[Any], *, building: bool) -> Iterator[Any]:
        """Nodes reachable from ``roots`` that were made in this forward and not visited before.

        ``building`` says that a node is under construction: the newest one, whose fields are not all filled yet, is
        passed over without being marked.
        """
        newest = next_sequence_nr() - 1 if building else -1
        stack = [root for root in roots if root is not None]
        while stack:
            node = stack.pop()
            if type(node).__name__ == "AccumulateGrad":
                continue
            number = node._sequence_nr()
            if number < self._start:
                continue
            marks = node.metadata
            if marks.get(_MARK) == self._number:
                continue
            if number != newest:
                marks[_MARK] = self._number
                yield node
            stack.extend(edge[0] for edge in node.next_functions if edge[0] is not None)
