"""Whatever ops follow each other: ``exact`` is plain training bit for bit, ``budget`` keeps to its noise, and of what
was held nothing is left when backward is over."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_models import BATCH, CLASSES, LENGTH, WIDTH, RandomModel
from torch import Tensor

import lowtide
from lowtide.session import Session

NOISE = 1e-4
MANY, FEW = 160, 6
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"remake": "linear"}, {"remake": False})


class Trial:
    """A model, a batch and a precision, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.model = RandomModel(seed)
        self.x, self.y = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(CLASSES, (BATCH,))
        self.bf16 = seed % 3 == 2

    def gradients(self, model: RandomModel, session: Session | None = None) -> list[Tensor]:
        """From the same weights, buffers and random numbers each time."""
        model.load_state_dict(self.model.state_dict())
        model.zero_grad()
        torch.manual_seed(self.seed)
        with contextlib.nullcontext() if session is None else session.recording():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                output = model(self.x * 1.0)
            loss = F.cross_entropy(output.float(), self.y)
        loss.backward()
        return [part.grad.clone() for part in model.parameters() if part.grad is not None]


def noise(some: list[Tensor], others: list[Tensor]) -> float:
    pairs = list(zip(some, others, strict=True))
    energy = sum(float(other.double().square().sum()) for _, other in pairs)
    return sum(float((one - other).double().square().sum()) for one, other in pairs) / energy


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < FEW else pytest.mark.slow) for seed in range(MANY)]
)
def test_gradients(seed: int) -> None:
    """Noise of three steps was 0.4 times what is asked for in the median of 48 models, 1.8 times at most in fp32, 2.9
    in bf16."""
    trial = Trial(seed)
    plain = trial.gradients(copy.deepcopy(trial.model))
    model = copy.deepcopy(trial.model)
    with lowtide.compress(model, "exact", min_size=0, check="full") as session:
        exact = trial.gradients(model, session)
    assert all(torch.equal(one, other) for one, other in zip(exact, plain, strict=True)), trial.model.describe()
    for number, options in enumerate(OPTIONS):
        model, found = copy.deepcopy(trial.model), []
        coder = ("blocks", "rans")[(seed + number) % 2]
        with lowtide.compress(model, noise=NOISE, min_size=0, check="full", coder=coder, **options) as session:
            for _ in range(9):
                found.append(noise(trial.gradients(model, session), plain))
                session.step()
            assert session.ledger.held == 0
        settled = sum(found[6:]) / 3
        assert 0 < settled < 4 * NOISE, f"{options}, {trial.model.describe()}: {found}"
