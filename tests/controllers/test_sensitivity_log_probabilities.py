"""What rounded probabilities add to the gradient of a log-softmax: predicted, drawn, and kept within what was asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.capture import sensitivity
from lowtide.capture.log_probabilities import rounding
from lowtide.capture.sums import Arrived
from lowtide.controllers import _levels
from lowtide.controllers.budget import Budget
from lowtide.records import Site
from lowtide.statistics import PROPAGATED, STEPS, SiteStatistics, Statistics

LOGITS = {
    "ten classes": lambda: torch.randn(300, 10) * 2,
    "sure of ten": lambda: torch.randn(300, 10) * 8,
    "a thousand words": lambda: torch.randn(64, 1000) * 3,
    "little is known": lambda: torch.randn(64, 1000) * 0.5,
    "maps": lambda: torch.randn(4, 12, 9, 9) * 2,
}


@pytest.mark.parametrize("case", LOGITS)
@pytest.mark.parametrize("bound", [2.0**-4.5, 0.0009, 2.0**-13.3])
def test_log_softmax(case: str, bound: float) -> None:
    """Drawn as the codec rounds: up or down to a multiple, at random. Bounds between those that are looked at."""
    torch.manual_seed(0)
    logits, dim = LOGITS[case]().double().requires_grad_(), 1
    y = F.log_softmax(logits, dim)
    gy = torch.randn_like(y) * torch.rand(y.shape[0], 1, *y.shape[2:]).square()
    with torch.no_grad():
        (probe,) = sensitivity.probes(Site("", "log_softmax", "result"), "log_probability", y.grad_fn, y.detach())
        added = probe.measure((), Arrived(gy)).tolist()
        assert probe.kind == PROPAGATED and len(added) == len(STEPS)
        found, p = 0.0, y.exp()
        for _ in range(40):
            rounded = torch.floor(p / bound + torch.rand_like(p)) * bound
            rounded = torch.where(p > 2046 * bound, p, rounded)
            found += float(((rounded - p) * gy.sum(dim, keepdim=True)).square().sum()) / 40
    curve = [each / added[0] for each in added]
    assert 0.8 < found / (added[0] * _levels.variance(bound, "float32", curve)) < 1.25
    back = _levels.bound_for(_levels.variance(bound, "float32", curve), "float32", curve)
    assert back == pytest.approx(bound)


def test_no_step_is_a_lucky_one_for_probabilities_that_are_all_alike() -> None:
    """Of 1 / 64 in steps of 1 / 128 none needs rounding; a step that differs by a hundredth would round all."""
    p = torch.full((4, 64), 1 / 64)
    assert float(rounding(p, 1 / 128).sum()) == pytest.approx(256 / 6 / 128**2)


def test_of_many_rows_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    y = F.log_softmax(torch.randn(512, 50, requires_grad=True) * 2, -1)
    gy, added = torch.randn_like(y), []
    for enough in (1 << 22, 512 * 50 // 4):
        monkeypatch.setattr("lowtide.capture.log_probabilities._ENOUGH", enough)
        (probe,) = sensitivity.probes(Site("", "log_softmax", "result"), "log_probability", y.grad_fn, y.detach())
        added.append(probe.measure((), Arrived(gy)))
    assert not added[0].equal(added[1])
    assert added[1].tolist() == pytest.approx(added[0].tolist(), rel=0.4)  # 128 rows, of weights with four tails


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 100))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def distilled(kind: str, near: float) -> tuple[Student, Callable[[], Tensor]]:
    """A student whose weights are off by ``near`` of their spread from its teacher's."""
    torch.manual_seed(0)
    teacher, student, x = Student(), Student(), torch.randn(256, 64)
    with torch.no_grad():
        teacher.layers[-1].weight.mul_(8)
        for mine, its in zip(student.parameters(), teacher.parameters(), strict=True):
            mine.copy_(its + near * its.std() * torch.randn_like(its))
        targets = teacher(x).softmax(-1)
    if kind == "kl_div":
        return student, lambda: F.kl_div(student(x).log_softmax(-1), targets, reduction="batchmean")
    return student, lambda: F.cross_entropy(student(x), targets)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def share(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    errors = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return errors / sum(float(part.square().sum()) for part in exact.values())


@pytest.mark.parametrize("kind", ["kl_div", "cross_entropy"])
@pytest.mark.parametrize("near", [0.1, 0.01])
def test_targets_that_are_probabilities(kind: str, near: float) -> None:
    """A row's gradient is next to nothing where it is right: under the bound that is assumed the noise was 0.25."""
    model, loss = distilled(kind, near)
    exact, noise = gradients(model, loss()), 0.0
    tide = lowtide.attach(model, "budget", min_size=0, coder="blocks")
    for step in range(12):
        with tide.recording():
            value = loss()
        noise += share(gradients(model, value), exact) / 4 * (step >= 8)
        tide.step()
    rules = {entry.name: entry.bound for entry in tide.report().sites}
    tide.detach()
    assert noise < 0.03
    bound, _, unit = next(bound for name, bound in rules.items() if "log_softmax" in name).partition(" ")
    assert unit == "probability" and (float(bound) < 0.0002) is (near == 0.01)


def test_what_is_predicted_is_what_storage_adds() -> None:
    """In the gradient of the logits, means of six draws of 256 rows; all else is exact. At weights less of it arrives,
    since a student's rows are off in like ways."""

    class Logits(nn.Module):
        def __init__(self, values: Tensor) -> None:
            super().__init__()
            self.values = nn.Parameter(values)

        def forward(self) -> Tensor:
            return self.values * 1.0

    torch.manual_seed(0)
    logits = torch.randn(256, 100) * 2
    model, targets = Logits(logits), (logits + 0.05 * torch.randn_like(logits)).softmax(-1)
    exact = gradients(model, F.kl_div(model().log_softmax(-1), targets, reduction="batchmean"))
    found = predicted = 0.0
    for seed in range(6):
        tide = lowtide.attach(model, "budget", min_size=0, coder="blocks", seed=seed, checks=0)
        for _ in range(7):
            with tide.recording():
                value = F.kl_div(model().log_softmax(-1), targets, reduction="batchmean")
            last = gradients(model, value)
            tide.step()
        found += share(last, exact) / 6
        (noise,) = (each for name, each in tide.report().noise.items() if "log_softmax" in name)
        predicted += (noise.propagated or 0.0) / 6
        tide.detach()
    assert 0.005 < predicted < 0.04
    assert 0.8 < found / predicted < 1.25


def test_labels_have_the_bound_that_is_assumed() -> None:
    """What follows from measurements is not used to make it any coarser."""
    torch.manual_seed(0)
    model, x, labels = Student(), torch.randn(256, 64), torch.randint(0, 100, (256,))
    tide = lowtide.attach(model, "budget", min_size=0, coder="blocks")
    for _ in range(10):
        with tide.recording():
            value = F.cross_entropy(model(x), labels)
        gradients(model, value)
        tide.step()
    (bound,) = (entry.bound for entry in tide.report().sites if "log_softmax" in entry.name)
    tide.detach()
    assert bound == str(Budget()._assumed("log_probability"))


def test_a_curve_survives_a_checkpoint() -> None:
    site = SiteStatistics("l:log_softmax.result", "log_softmax", "log_probability", "probability", "float32", "l", 9)
    found = Statistics(0, {site.site: SiteStatistics(**{**vars_of(site), "curve": (1.0, 0.25)})})
    assert Statistics.from_state(found.to_state()) == found


def vars_of(site: SiteStatistics) -> dict[str, object]:
    return {name: getattr(site, name) for name in SiteStatistics.__slots__}
