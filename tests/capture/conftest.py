"""Models from a function, their gradients, and a look at what their graph saved."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.codecs.sz import Sz
from lowtide.policies.rules import Policy
from lowtide.records import Encoded, Kind, Need, TensorSpec


class _Applied(nn.Module):
    def __init__(self, function: Callable[..., Any], children: dict[str, nn.Module]) -> None:
        super().__init__()
        self._function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *inputs: Any) -> Any:
        return self._function(self, *inputs)


@pytest.fixture
def build() -> Callable[..., nn.Module]:
    """``build(lambda self, x: self.a(x).tanh(), a=nn.Linear(4, 4))``: a module whose forward is that function."""
    return lambda function, **children: _Applied(function, children)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """What ``sz`` has decoded, as long as somebody holds it."""
    found: list[weakref.ref[Tensor]] = []
    decode = Sz.decode

    def watched(self: Sz, encoded: Encoded) -> Tensor:
        tensor = decode(self, encoded)
        found.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Sz, "decode", watched)
    return found


@pytest.fixture
def gradients() -> Callable[..., list[Tensor]]:
    """Gradients of a fixed random projection of the output: of the parameters, then of the inputs that want one."""

    def run(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
        torch.manual_seed(1)  # the same dropout every time
        leaves = [*model.parameters(), *inputs]
        for leaf in leaves:
            leaf.grad = None
        output = model(*inputs)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
        output.backward(weights)
        return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]

    return run


@pytest.fixture
def node() -> Callable[[Tensor, str], Any]:
    """The first autograd node of that name on the way back from a tensor."""

    def find(output: Tensor, name: str) -> Any:
        names = []
        for candidate in _nodes(output):
            names.append(type(candidate).__name__)
            if names[-1] == name:
                return candidate
        raise AssertionError(f"no {name} in {names}")

    return find


def _nodes(output: Tensor) -> Iterator[Any]:
    stack, seen = [output.grad_fn], set()
    while stack:
        current = stack.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        yield current
        stack.extend(edge[0] for edge in current.next_functions)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the policy was asked about one site."""

    need: Need
    spec: TensorSpec

    def summary(self) -> tuple[Any, ...]:
        """The kind of need; for values also the family, the granularity and the axes of the bound."""
        need = self.need
        if need.kind is not Kind.VALUES:
            return (need.kind.value,)
        return need.kind.value, need.family, need.per.value, need.axes(len(self.spec.shape))


@pytest.fixture
def needs(monkeypatch) -> Callable[..., dict[str, Seen]]:
    """``needs(model, *inputs)`` runs forward and backward and says, by site, what was found to be needed."""

    def run(model: nn.Module, *inputs: Tensor, method: str = "fixed", **options: Any) -> dict[str, Seen]:
        seen: dict[str, Seen] = {}
        decide = Policy.decide

        def note(self, site, need, spec):
            seen[site.name] = Seen(need, spec)
            return decide(self, site, need, spec)

        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "this forward saved tensors", lowtide.LowtideWarning)
            patch.setattr(Policy, "decide", note)
            session = lowtide.attach(model, method, check=True, **{"min_size": 0, **options})
            model(*inputs).sum().backward()
            session.detach()
        return seen

    return run
