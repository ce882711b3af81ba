"""``remake="linear"`` on a device: layers are run again by its kernels, eagerly and in a captured step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from no_waiting import no_waiting
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo
from lowtide.session import Session

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")]

NOISE = 0.01
MODELS = pytest.mark.parametrize("name", ["gpt", "llama", "vit_b_16"])
PRECISIONS = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


class Run:
    """A model of the zoo, the same batch in every step, and an optimizer that changes nothing."""

    def __init__(self, name: str, *, bf16: bool) -> None:
        torch.manual_seed(0)
        self._entry, self._bf16 = zoo.describe(name), bf16
        self.model: nn.Module = self._entry.build(**self._entry.tiny).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0)
        self.batch = [item.cuda() for item in self._entry.example(32, **self._entry.tiny)]

    def attach(self, remake: bool | str = "linear", **options: Any) -> Session:
        given = {"noise": NOISE, "min_size": 1024, "optimizer": self.optimizer, **options}
        return lowtide.attach(self.model, remake=remake, **given)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._bf16):
            output = self.model(x)
        loss = self._entry.loss(output.float(), y)
        loss.backward()
        return loss

    def gradients(self, step: Any = None) -> list[Tensor]:
        self.model.zero_grad()
        (step or self.step)(*self.batch)
        found = [item.grad.clone() for item in self.model.parameters() if item.grad is not None]
        self.optimizer.step()
        return found


def noise(found: list[Tensor], exact: list[Tensor]) -> float:
    errors = sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True))
    return errors / sum(float(b.double().square().sum()) for b in exact)


def codecs_of(session: Session) -> Counter[str]:
    return Counter(site.codec for site in session.report().sites)


@PRECISIONS
@MODELS
def test_less_is_held_and_gradients_are_as_good(name: str, bf16: bool) -> None:
    held = {}
    for remake in (True, "linear"):
        run = Run(name, bf16=bf16)
        exact = run.gradients()
        session = run.attach(remake)
        for _ in range(20):
            found = run.gradients()
        assert (codecs_of(session)["again by linear"] > 0) is (remake == "linear")
        with no_waiting():
            run.model.zero_grad()
            run.step(*run.batch)
        session.detach()
        held[remake] = session.ledger.held_peak
        assert 0 < noise(found, exact) < 2 * NOISE
    assert held["linear"] < 0.85 * held[True]


@PRECISIONS
@pytest.mark.parametrize(("name", "ops"), [("gpt", ("addmm", "mm")), ("vit_b_16", ("addmm",))], ids=["gpt", "vit_b_16"])
def test_of_exact_inputs_it_makes_what_there_was(name: str, ops: tuple[str, ...], bf16: bool) -> None:
    """The library may choose another kernel, so bits may differ: by roundings, and no more."""
    run = Run(name, bf16=bf16)
    exact = run.gradients()
    repeated = noise(run.gradients(), exact)
    session = run.attach(rules=[{"op": op, "keep": True} for op in (*ops, "native_layer_norm")])
    found = run.gradients()
    session.detach()
    assert codecs_of(session)["again by linear"] > 0
    assert noise(found, exact) <= max(4 * repeated, 1e-4 if bf16 else 1e-9)


@PRECISIONS
@MODELS
def test_a_captured_step_has_the_noise_of_an_eager_one(name: str, bf16: bool) -> None:
    run = Run(name, bf16=bf16)
    exact = run.gradients()
    session = run.attach()
    for _ in range(30):
        run.gradients()
    eager = [noise(run.gradients(), exact) for _ in range(4)]
    step = session.graph(run.step, warmup=5)
    for _ in range(200):
        run.gradients(step)
        if step.replays:
            break
    assert step.replays, step.describe()
    replayed = [noise(run.gradients(step), exact) for _ in range(8)]
    assert codecs_of(session)["again by linear"] > 0
    session.detach()
    expected = sum(eager) / len(eager)
    assert expected > 0 and all(0.3 * expected < item < 3 * expected for item in replayed), (eager, replayed)


@MODELS
def test_replays_read_the_weights_as_they_are(name: str) -> None:
    """Layers are run again with those of the replay, not with those of the capture."""
    run = Run(name, bf16=True)
    session = run.attach()
    step = session.graph(run.step, warmup=5)
    for _ in range(200):
        run.gradients(step)
        if step.replays:
            break
    with torch.no_grad():
        for item in run.model.parameters():
            item.mul_(1 + 0.3 * torch.randn_like(item))
    before = step.replays
    found = [run.gradients(step) for _ in range(2)]
    assert step.replays > before, step.describe()
    session.detach()
    assert noise(found[-1], run.gradients()) < 0.1
