"""accelerate: one call after ``prepare`` compresses, counts steps, and its state goes into checkpoints."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


@pytest.fixture
def start(library, make_net):
    """A fresh accelerator with a model in training; ``step`` is one batch."""
    accelerate = library("accelerate")
    from lowtide.integrations.accelerate import attach

    class Loop:
        def __init__(self, accumulate=1):
            library("accelerate.state").AcceleratorState._reset_state(True)
            self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
            torch.manual_seed(1)
            model = make_net()
            self.model, self.optimizer = self.accelerator.prepare(
                model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            )
            self.tide = attach(self.accelerator, self.model, self.optimizer, "fixed")

        def step(self, number):
            images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(number))
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(images), torch.arange(16) % 10)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()

        def weights(self):
            return list(self.model.state_dict().values())

    return Loop


def test_the_example(library, run_example, assert_compressed):
    library("accelerate.state").AcceleratorState._reset_state(True)
    assert_compressed(run_example("accelerate_loop", epochs=1))


def test_compresses_and_counts_steps_of_the_optimizer(start, assert_compressed, assert_detached):
    loop = start(accumulate=2)
    for number in range(4):
        loop.step(number)
    assert_compressed(loop.tide)
    assert loop.tide.report().totals["step"] == 2
    loop.tide.detach()
    assert_detached(loop.model)


def test_a_resumed_run_equals_one_that_was_not_stopped(start, tmp_path, assert_same):
    whole = start()
    for number in range(4):
        whole.step(number)
    half = start()
    half.step(0), half.step(1)
    half.accelerator.save_state(str(tmp_path / "state"))
    resumed = start()
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert resumed.tide.report().totals["step"] == 2
    resumed.step(2), resumed.step(3)
    assert_same(whole.weights(), resumed.weights())


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "lowtide.integrations.accelerate", raising=False)
    with pytest.raises(ImportError, match="pip install accelerate"):
        import lowtide.integrations.accelerate  # noqa: F401
