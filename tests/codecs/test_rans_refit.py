"""Models that follow other models of the same site: an alphabet is kept as long as another gains next to nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.codecs.sz import Plan, Sz
from lowtide.coding import rans, rans_fit
from lowtide.records import Bound

COUNT = 1 << 20


def codes(scale: float, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(64 * 1536, generator=generator) * scale).round().int()


def fit(q: Tensor, count: int, before: rans.Model | None = None, *, zero_code: bool = False) -> rans.Model:
    return rans_fit.fit(q, count, before, zero_code=zero_code)


def best_of(q: Tensor, values: int) -> rans.Model:
    """The model of the best alphabet with so many values a symbol."""
    sample = rans_fit.Sample(q, zero_code=False)
    return sample.model(sample.alphabet(values, COUNT))


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 20.0])
def test_other_samples_of_the_same_kind_have_the_same_alphabet(scale: float) -> None:
    model = fit(codes(scale), COUNT)
    for seed in range(1, 6):
        drift = scale * (1 + 0.01 * (seed - 3))
        again = fit(codes(drift, seed=seed), COUNT, model)
        best = best_of(codes(drift, seed=seed), model.alphabet.values)
        assert again.alphabet == model.alphabet and again.bits <= 1.01 * best.bits
        model = again


def test_an_alphabet_that_costs_more_is_given_up() -> None:
    """Codes that lie elsewhere, or further apart; symbols that are not used cost nothing."""
    model = fit(codes(1.0), COUNT)
    for q in (codes(1.0) + 3, codes(3.0)):
        again = fit(q, COUNT, model)
        assert again.alphabet != model.alphabet
        assert again.bits == best_of(q, again.alphabet.values).bits
    assert fit(codes(0.7), COUNT, model).alphabet == model.alphabet


def test_what_zeros_and_sizes_ask_for_comes_first() -> None:
    """A format without a code for zero does not serve one with it, nor do chunks of another length."""
    q = codes(1.0)
    model = fit(q, 16 * COUNT)
    assert fit(torch.where(q == 0, rans.ZERO_CODE, q), 16 * COUNT, model, zero_code=True).alphabet.zero
    assert fit(q, COUNT, model).alphabet.rows < model.alphabet.rows
    model = fit(q, COUNT)
    odd = replace(model, alphabet=replace(model.alphabet, fill=model.alphabet.fill - 1))
    assert fit(q, COUNT, odd).alphabet == odd.alphabet, "a digit to fill with is as good as another"


class Net(nn.Sequential):
    """A small convolutional net that learns to tell ten noisy patterns apart."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 8), (8, 16)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        self.saved: dict[str, Tensor] = {}
        for name, module in self.named_children():
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
                module.register_forward_hook(lambda _, x, y, name=name: self.saved.update({name: x[0].detach()}))

    def train_for(self, steps: int, patterns: Tensor) -> None:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        for _ in range(steps):
            y = torch.randint(0, 10, (16,))
            x = patterns[y] * (0.7 + 0.6 * torch.rand(16, 1, 1, 1)) + 0.6 * torch.randn(16, 3, 16, 16)
            optimizer.zero_grad()
            F.cross_entropy(self(x), y).backward()
            optimizer.step()


def test_alphabets_stay_while_a_net_learns() -> None:
    """Each that changes costs a capture of the graph that its site is part of; 0.4 std, as methods have it."""
    torch.manual_seed(0)
    net, codec, plans = Net(), Sz(coder="rans"), dict[str, Plan]()
    patterns = F.interpolate(torch.randn(10, 3, 4, 4), size=16, mode="bilinear")
    kept = changed = 0
    for steps in (12, 8, 16, 32):
        net.train_for(steps, patterns)
        for name, x in net.saved.items():
            before = plans.get(name)
            grid = codec.grid(x, Bound.absolute(0.4 * float(x.std())))
            zero_code = before.zero_code if before is not None else None
            plan = plans[name] = codec.fit(grid, codec.survey(x, grid), x.numel(), zero_code, before)
            if before is not None:
                assert plan.model is not None and before.model is not None
                is_kept = plan.model.alphabet == before.model.alphabet
                kept, changed = kept + is_kept, changed + (not is_kept)
    assert kept + changed == 3 * 6 and changed <= 1, (kept, changed)
