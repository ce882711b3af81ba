"""Train a model twice, plain and with Lowtide, and compare everything that training leaves behind, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lowtide
from lowtide import Session

STEPS = 5
SEED = 11

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
}

Scope = Callable[[nn.Module, Optimizer], AbstractContextManager[Session | None]]
Trace = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Problem:
    """What to train: ``build`` makes the model, ``sample`` a batch, ``score(model, *batch)`` gives the loss."""

    build: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], tuple[Tensor, ...]]
    score: Callable[..., Tensor]
    bf16: bool = False
    channels_last: bool = False

    def forward(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The loss of one forward, under autocast if the problem says so."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return self.score(model, *batch)


Step = Callable[[Problem, nn.Module, tuple[Tensor, ...]], list[Tensor]]


def one_backward(problem: Problem, model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """The usual step: forward, backward; what it returns is compared."""
    loss = problem.forward(model, batch)
    loss.backward()
    return [loss.detach()]


@contextlib.contextmanager
def plainly(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    yield None


def attached(method: str = "exact", **options: Any) -> Scope:
    """Training with Lowtide attached for all its steps."""

    @contextlib.contextmanager
    def scope(model: nn.Module, optimizer: Optimizer) -> Iterator[Session]:
        settings = {"min_size": 64, "check": True, **options}
        session = lowtide.attach(model, method, optimizer=optimizer, **settings)
        try:
            yield session
        finally:
            session.detach()

    return scope


def train(
    problem: Problem, scope: Scope, *, steps: int = STEPS, optimizer: str = "sgd", step: Step = one_backward
) -> tuple[Trace, Session | None]:
    """All that ``steps`` steps leave behind, by name: losses, gradients, weights, buffers, momenta, RNG state."""
    torch.manual_seed(SEED)
    model = problem.build()
    if problem.channels_last:
        model.to(memory_format=torch.channels_last)
    optimizing = _OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    trace: Trace = {}
    with scope(model, optimizing) as session:
        for index in range(steps):
            batch = _draw(problem, index)
            optimizing.zero_grad()
            for position, value in enumerate(step(problem, model, batch)):
                trace[f"step {index}: value {position}"] = value.clone()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    trace[f"step {index}: gradient of {name}"] = parameter.grad.clone()
            optimizing.step()
    trace |= {f"state of {name}": value.clone() for name, value in model.state_dict().items()}
    for number, state in optimizing.state_dict()["state"].items():
        trace |= {f"optimizer {number} {name}": value for name, value in state.items() if isinstance(value, Tensor)}
    trace["global RNG"] = torch.get_rng_state()
    return trace, session


def assert_exact(problem: Problem, scope: Scope | None = None, *, coded: set[str] | None = None, **how: Any) -> Session:
    """Training in ``scope`` (attached, if none is given) equals plain training; ``coded`` must be among its codecs."""
    expected, _ = train(problem, plainly, **how)
    trace, session = train(problem, scope or attached(), **how)
    assert session is not None
    assert_bit_equal(trace, expected)
    assert any(value.isfinite().all() and value.any() for name, value in trace.items() if "gradient" in name)
    used = codecs_of(session)
    assert (coded or set()) <= used, f"the test is empty unless {coded} are at work; at work were {used}"
    return session


def assert_bit_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and under each the same dtype, shape, strides and bits: -0.0 is not 0.0, NaN equals itself."""
    assert list(got) == list(expected)
    differences = {name: _difference(got[name], expected[name]) for name in got}
    wrong = [f"{name}: {difference}" for name, difference in differences.items() if difference]
    assert not wrong, f"{len(wrong)} of {len(got)} differ:\n" + "\n".join(wrong[:12])


def codecs_of(session: Session) -> set[str]:
    """The codecs that held a save in the last step of each site."""
    return {entry.codec for entry in session.ledger.sites.values()} - {"kept"}


def _draw(problem: Problem, index: int) -> tuple[Tensor, ...]:
    batch = problem.sample(torch.Generator().manual_seed(1000 + index))
    if not problem.channels_last:
        return batch
    return tuple(item.to(memory_format=torch.channels_last) if item.dim() == 4 else item for item in batch)


def _bits(tensor: Tensor) -> Tensor:
    dense = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return dense.resolve_neg().contiguous().view(_INTEGERS[dense.element_size()])


def _difference(got: Tensor, expected: Tensor) -> str:
    """What differs, in words; nothing if nothing does."""
    if (got.dtype, got.shape, got.stride()) != (expected.dtype, expected.shape, expected.stride()):
        forms = [f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}" for tensor in (got, expected)]
        return f"{forms[0]}, not {forms[1]}"
    unequal = _bits(got) != _bits(expected)
    if not bool(unequal.any()):
        return ""
    worst = (got.double() - expected.double()).abs().max().item()
    return f"{int(unequal.sum())} of {unequal.numel()} elements, by up to {worst:.3g}"
