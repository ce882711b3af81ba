"""What arrives of noise that goes on: branches and streams, where gradients meet; and shares under several limits."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.capture.flow import Flow
from lowtide.controllers._sharing import Limit, Part, divide, spread
from lowtide.controllers.budget import Budget
from lowtide.ledger import Ledger
from lowtide.statistics import PROPAGATED, WEIGHT, Arrival, Claim, SiteStatistics, Statistics


class Residual(nn.Module):
    """A stream with branches: a norm, a layer, a function and a layer each."""

    def __init__(self, depth: int = 3, width: int = 48, scale: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + self.scale * down(torch.nn.functional.gelu(up(norm(x))))
        return self.head(x)


def nodes_of(root: Any, name: str) -> list[Any]:
    """Nodes by name, the lowest first."""
    found: dict[int, Any] = {}
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [below for below, _ in node.next_functions]
        if type(node).__name__ == name:
            found[node._sequence_nr()] = node
    return [found[number] for number in sorted(found)]


def arrivals(loss: Tensor, sites: dict[str, tuple[Any, int]]) -> tuple[Arrival, ...]:
    """Of noise that sites add to what their nodes give back along an edge; the head has a site, too."""
    flow = Flow()
    flow.add("head", nodes_of(loss.grad_fn, "AddmmBackward0")[-1], [])
    for name, (node, edge) in sorted(sites.items(), key=lambda item: item[1][0]._sequence_nr()):
        flow.add(name, node, [edge])
    loss.backward(retain_graph=True)
    norms, read = flow.finish()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.capture.flow.merge", tuple)  # or weights at which the same arrives would be one
        return read([float(each) for each in norms])


def drawn(
    loss: Tensor, node: Any, edge: int, weights: dict[str, nn.Parameter], draws: int = 60, share: float = 0.01
) -> dict[str, float]:
    """By weight, how much of a share of noise arrives that is added to what ``node`` gives back."""
    exact = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), retain_graph=True), strict=True))
    found = dict.fromkeys(weights, 0.0)

    def disturb(outgoing: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        given = outgoing[edge]
        assert given is not None
        noise = torch.randn_like(given)
        noise *= given.norm() * math.sqrt(share) / noise.norm()
        return (*outgoing[:edge], given + noise, *outgoing[edge + 1 :])

    hook = node.register_hook(disturb)
    for _ in range(draws):
        got = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
        for name, gradient in zip(weights, got, strict=True):
            found[name] += float((gradient - exact[name]).square().sum() / exact[name].square().sum()) / share / draws
    hook.remove()
    return found


def by_energy(found: tuple[Arrival, ...], weights: dict[str, nn.Parameter]) -> dict[str, Arrival]:
    """The arrival of each weight: known by the energy of its gradient."""
    return {
        name: min(
            (each for each in found if each.is_scale is (weight.dim() < 2)),
            key=lambda each: abs(each.energy - float(weight.grad.square().sum())),
        )
        for name, weight in weights.items()
    }


def test_a_share_of_a_branch_is_a_smaller_one_of_the_stream() -> None:
    """Noise at the uppermost norm: no less than is drawn, layer by layer, and no more than four times as much (the sum
    over rows that a weight's gradient is leaves less of random noise than of a gradient). All of it would be a hundred
    times as much."""
    model = Residual(depth=4)
    loss = (model(torch.randn(256, 48)) - torch.randn(256, 48)).square().sum()
    norm = nodes_of(loss.grad_fn, "NativeLayerNormBackward0")[-1]
    found = arrivals(loss, {"norm": (norm, 0)})
    weights = {f"{kind}{n}": getattr(model, kind)[n].weight for kind in ("ups", "downs") for n in range(3)}
    weights["stem"] = model.stem.weight
    told, seen = by_energy(found, weights), drawn(loss, norm, 0, weights)
    for name in weights:
        assert 1 < told[name].shares["norm"] / seen[name] < 4, (name, told[name], seen[name])
        assert told[name].shares["norm"] < 0.05
    above = by_energy(found, {"up": model.ups[3].weight})["up"]
    assert "norm" not in above.shares, "noise goes down"


def test_inside_of_a_branch_all_of_it_arrives() -> None:
    model = Residual()
    loss = model(torch.randn(64, 48)).square().sum()
    gelu = nodes_of(loss.grad_fn, "GeluBackward0")
    found = arrivals(loss, {f"gelu{n}": (node, 0) for n, node in enumerate(gelu)})
    told = by_energy(found, {f"up{n}": model.ups[n].weight for n in range(3)})
    for n in range(3):
        assert told[f"up{n}"].shares[f"gelu{n}"] == 1.0
        assert all(f"gelu{m}" not in told[f"up{n}"].shares for m in range(n)), "those below"
        assert all(0 < told[f"up{n}"].shares[f"gelu{m}"] < 0.5 for m in range(n + 1, 3)), "those above, diluted"


def test_one_after_the_other_all_of_it_arrives() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    loss = model(torch.randn(16, 8)).square().sum()
    lower, upper = nodes_of(loss.grad_fn, "GeluBackward0")
    found = arrivals(loss, {"lower": (lower, 0), "upper": (upper, 0)})
    told = by_energy(found, {"0": model[0].weight, "2": model[2].weight})
    assert dict(told["0"].shares) == {"lower": 1.0, "upper": 1.0}
    assert dict(told["2"].shares) == {"upper": 1.0}


def test_shares_of_parts_that_are_put_together() -> None:
    """Noise in one of three parts of a tensor is as large a share of the whole as the part is."""
    weight = nn.Parameter(torch.randn(6, 12))
    a, b, c = (torch.randn(10, 6) @ weight).chunk(3, -1)
    made = torch.nn.functional.gelu(a)
    loss = (made * 2).sum() + (b * 3).sum() + c.square().sum()
    node = nodes_of(loss.grad_fn, "GeluBackward0")[0]
    flow = Flow()
    for other in nodes_of(loss.grad_fn, "MulBackward0") + nodes_of(loss.grad_fn, "PowBackward0"):
        flow.add(f"{other._sequence_nr()}", other, [])
    flow.add("gelu", node, [0])
    parts = torch.autograd.grad(loss, (a, b, c), retain_graph=True)
    loss.backward()
    norms, read = flow.finish()
    (found,) = read([float(each) for each in norms])
    energies = [float(part.square().sum()) for part in parts]
    assert found.shares["gelu"] == pytest.approx(energies[0] / sum(energies), rel=1e-5)


def test_scales_are_told_from_weights() -> None:
    model = Residual(depth=1)
    loss = model(torch.randn(64, 48)).square().sum()
    norm = nodes_of(loss.grad_fn, "NativeLayerNormBackward0")[0]
    found = arrivals(loss, {"scale": (norm, 1), "input": (norm, 0)})
    scale = by_energy(found, {"scale": model.norms[0].weight})["scale"]
    assert scale.is_scale and dict(scale.shares) == {"scale": 1.0}
    stem = by_energy(found, {"stem": model.stem.weight})["stem"]
    assert not stem.is_scale and "scale" not in stem.shares and 0 < stem.shares["input"] < 1


def test_of_forwards_with_a_backward_each_the_first_one_counts() -> None:
    model, flow = Residual(depth=1), Flow()
    counts = []
    for _ in range(2):
        loss = model(torch.randn(8, 48)).square().sum()
        flow.add("norm", nodes_of(loss.grad_fn, "NativeLayerNormBackward0")[0], [0])
        loss.backward()
        counts.append(len(flow.finish()[0]))
    assert counts[0] == counts[1] > 0


def test_forwards_that_meet_in_one_loss_all_count() -> None:
    """What the loss adds arrives by both; it had been forgotten once a site came by for the second time."""
    model, flow = Residual(depth=1), Flow()
    first, second = (model(torch.randn(8, 48)) for _ in range(2))
    for made in (first, second):
        flow.add("norm", nodes_of(made.grad_fn, "NativeLayerNormBackward0")[0], [0])
    loss = (first * second).sum()
    flow.add("loss", nodes_of(loss.grad_fn, "MulBackward0")[-1], [0, 1])
    loss.backward()
    norms, read = flow.finish()
    found = read([float(each) for each in norms])
    assert found and all(arrival.shares["loss"] == pytest.approx(1.0) for arrival in found)
    assert any(arrival.shares.get("norm", 0.0) > 0 for arrival in found)


def test_noise_of_one_of_two_gradients_that_cancel_is_all_the_larger() -> None:
    """A function with one saved tensor in a branch that takes back all but a twentieth of what the other one brings."""
    torch.manual_seed(0)
    stem, x = nn.Linear(48, 48), torch.randn(64, 48)
    made = stem(x)
    loss = (made - 0.95 * (made + 0.01 * torch.sin(made))).sum() + (0.001 * made.square()).sum()
    branch, both = nodes_of(loss.grad_fn, "SinBackward0")[0], nodes_of(loss.grad_fn, "SubBackward0")[0]
    found = arrivals(loss, {"branch": (branch, 0), "first": (both, 0)})
    gradient = torch.autograd.grad(loss, made, retain_graph=True)[0]
    alone = 0.95 * 0.01 * torch.cos(made.detach())
    expected = float(alone.square().sum() / gradient.square().sum())
    assert [each.shares["branch"] for each in found] == pytest.approx([expected] * 2, rel=0.05)
    expected = float(made.numel() / gradient.square().sum())
    assert expected > 50
    assert [each.shares["first"] for each in found] == pytest.approx([expected] * 2, rel=0.05)


def test_a_product_of_activations_goes_on_and_one_with_a_computed_weight_does_not() -> None:
    class Similar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.scale = nn.Linear(48, 48), nn.Parameter(torch.ones(48, 1))
            self.weight = nn.Parameter(torch.randn(48, 48))

        def forward(self, x: Tensor) -> Tensor:
            made = self.stem(x).sin()
            return (made @ made.flip(0).t()).sum() + (made @ (self.weight * self.scale)).sum()

    model, kinds = Similar(), {}
    update = Budget._update

    def watched(self: Budget, statistics: Statistics, ledger: Ledger) -> Any:
        kinds.update({name: [claim.kind for claim in site.claims] for name, site in statistics.sites.items()})
        return update(self, statistics, ledger)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "_update", watched)
        tide = lowtide.attach(model, "budget", min_size=0)
        for _ in range(2):
            model(torch.randn(64, 48)).backward()
            tide.step()
        tide.detach()
    found = [kind for name, kind in kinds.items() if ":mm.self" in name]
    assert sorted(found) == [[PROPAGATED], [WEIGHT]]


def test_a_graph_is_not_kept_alive() -> None:
    model, flow = Residual(depth=1), Flow()
    loss = model(torch.randn(8, 48)).square().sum()
    node = nodes_of(loss.grad_fn, "GeluBackward0")[0]
    seen = weakref.ref(node._saved_self)
    flow.add("gelu", node, [0])
    del node, loss
    gc.collect()
    assert seen() is None


def test_gradients_that_nobody_asks_for() -> None:
    """``torch.autograd.grad`` for one weight: what is not computed has no energy, and nothing fails."""
    model, flow = Residual(depth=2), Flow()
    loss = model(torch.randn(8, 48)).square().sum()
    for n, node in enumerate(nodes_of(loss.grad_fn, "NativeLayerNormBackward0")):
        flow.add(f"norm{n}", node, [0])
    torch.autograd.grad(loss, [model.ups[1].weight])
    norms, read = flow.finish()
    assert all(math.isfinite(share) for each in read([float(n) for n in norms]) for share in each.shares.values())


class Foreign(Tensor):
    """As those of tensor-parallel layers: its numbers are not to be had without asking other devices."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("nobody is to look at it")


def test_what_cannot_be_looked_at_counts_as_if_it_had_brought_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of one branch, or of a weight, is no plain tensor."""
    monkeypatch.setattr("lowtide.capture.flow.merge", tuple)
    model, flow = Residual(depth=2), Flow()
    loss = model(torch.randn(8, 48)).square().sum()
    norms = nodes_of(loss.grad_fn, "NativeLayerNormBackward0")
    for n, node in enumerate(norms):
        flow.add(f"norm{n}", node, [0])
    flow.add("head", nodes_of(loss.grad_fn, "AddmmBackward0")[-1], [])
    loss.backward()
    sent, read = flow.finish()
    known = read([float(each) for each in sent])
    above = (norms[1]._sequence_nr(), 0)
    flow._note(above, [torch.ones(3).as_subclass(Foreign)])
    sent, read = flow.finish()
    stem = by_energy(known, {"stem": model.stem.weight})["stem"]
    assert stem.shares["norm1"] < 0.9
    found = by_energy(read([float(each) for each in sent]), {"stem": model.stem.weight})["stem"]
    assert found.shares["norm1"] >= 1.0
    leaf = next((number, edge) for number, edges in flow._leaves.items() for edge, is_scale in edges if not is_scale)
    flow._note(leaf, [torch.ones(3).as_subclass(Foreign)])
    sent, read = flow.finish()
    arrivals = read([float(each) for each in sent])
    assert all(math.isfinite(arrival.energy) for arrival in arrivals) and any(not each.energy for each in arrivals)


def test_arrivals_are_part_of_the_state() -> None:
    made = Statistics(3, {}, None, False, (Arrival({"a": 0.5}, 2.0, True), Arrival({}, 1.0)))
    assert Statistics.from_state(json.loads(json.dumps(made.to_state()))) == made


# Shares under several limits.


def test_one_limit_for_all_divides_as_ever() -> None:
    parts = [Part("a", 0.1, 2), Part("b", 10, 1), Part("c", 10, 3)]
    found = spread(parts, [Limit(dict.fromkeys("abc", 1.0), 1.0)])
    assert found == pytest.approx(divide(1.0, parts), rel=1e-3)


def test_what_nothing_limits_takes_all_it_can() -> None:
    found = spread([Part("a", 5.0, 1), Part("b", 7.0, 1)], [Limit({"a": 1.0}, 2.0)])
    assert found == pytest.approx({"a": 2.0, "b": 7.0}, rel=1e-3)


def test_branches_have_limits_of_their_own() -> None:
    """Two branches under a stream that sees a tenth of either: each may have its own limit of 1, not half of it."""
    parts = [Part(name, 100.0, 1) for name in "ab"]
    limits = [Limit({"a": 1.0}, 1.0), Limit({"b": 1.0, "a": 0.1}, 1.0), Limit({"a": 0.1, "b": 0.1}, 1.0)]
    found = spread(parts, limits)
    assert found == pytest.approx({"a": 1.0, "b": 0.9}, rel=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_no_limit_is_exceeded_and_no_other_amounts_are_better(seed: int) -> None:
    """Against many amounts that just keep the limits; what is reached is within a hundredth of a bit a value."""
    random = torch.Generator().manual_seed(seed)
    count, rows = 12, 9
    parts = [Part(f"{n}", float(torch.rand(1, generator=random)) + 0.01, n % 5 + 1) for n in range(count)]
    factors = torch.rand(rows, count, generator=random) * (torch.rand(rows, count, generator=random) < 0.5)
    limits = [Limit({f"{n}": float(row[n]) for n in range(count)}, 0.3 + 0.1 * k) for k, row in enumerate(factors)]
    found = spread(parts, limits)
    for limit in limits:
        assert sum(found[name] * share for name, share in limit.shares.items()) <= limit.most * (1 + 1e-9)
    assert all(0 < found[part.name] <= part.most for part in parts)
    size = sum(part.size for part in parts)

    def worth(amounts: dict[str, float]) -> float:
        return sum(part.size * math.log2(amounts[part.name]) for part in parts) / size

    best = worth(found)
    for draw in range(300):
        width = 0.5 if draw % 2 else 0.05
        other = {
            part.name: min(found[part.name] * math.exp(width * float(torch.randn(1, generator=random))), part.most)
            for part in parts
        }
        over = max(sum(other[name] * share for name, share in limit.shares.items()) / limit.most for limit in limits)
        other = {name: amount / max(over, 1) for name, amount in other.items()}
        assert worth(other) < best + 0.01


# Bounds that follow.


def site(name: str, claims: tuple[Claim, ...]) -> SiteStatistics:
    return SiteStatistics(name, "mul", "product", "absolute", "float32", name, 1000, claims=claims, std=100.0)


def shares(noise: float, *found: Arrival, sites: tuple[str, ...] = ("a", "b"), **options: Any) -> dict[str, float]:
    """What a budget lets each site add to gradients that go on."""
    budget = Budget(noise=noise, **options)
    made = [site(name, (Claim(PROPAGATED, 1.0, 1.0),)) for name in sites]
    parts = [Part(each.site, 100.0, each.numel) for each in made]
    return budget._divide_propagated(parts, {each.site: {each.site: 1.0} for each in made}, found)


def test_without_arrivals_all_sites_divide_one_amount() -> None:
    assert shares(0.02) == pytest.approx({"a": 0.01, "b": 0.01})


def test_what_does_not_arrive_need_not_be_divided() -> None:
    """Two branches, each with a weight that sees all of its own; a stem, with half of the energy, sees a tenth."""
    found = shares(
        0.04, Arrival({"a": 1.0}, 1.0), Arrival({"b": 1.0}, 1.0), Arrival({"a": 0.1, "b": 0.1}, 2.0)
    )  # fmt: skip
    assert found["a"] == pytest.approx(found["b"], rel=1e-3)
    mean = (found["a"] * 1.0 + found["b"] * 1.0 + 2 * (found["a"] + found["b"]) * 0.1) / 4
    usual = (0.02 + 0.02 + 2 * 0.04 * 0.1) / 4
    assert mean == pytest.approx(max(0.01, usual), rel=0.01), "a quarter, in the mean, or what it was without"
    assert found["a"] < 0.04


def test_scales_have_a_share_of_their_own() -> None:
    found = shares(0.01, Arrival({"a": 1.0}, 1e-6, True), Arrival({"b": 1.0}, 1.0), scale=0.2)
    assert found["a"] == pytest.approx(0.2, rel=0.01) and found["b"] <= 0.01


def test_scales_that_carry_much_of_the_gradient_count_in_the_mean() -> None:
    """As those of branches that are scaled down: a tenth of the energy may have a quarter of the noise, times ten."""
    found = shares(0.04, Arrival({"a": 1.0}, 0.1, True), Arrival({}, 0.9), sites=("a",))
    assert found["a"] == pytest.approx(0.1, rel=0.01)


def test_a_tensor_that_several_sites_read_counts_with_what_arrives_of_each() -> None:
    """Its variance counts once for a site all of which arrives, and once, three times as large, for one of which a
    hundredth does: (1 + 0.03) / 4 of what both add."""
    budget = Budget(noise=0.04)
    going = {"x": {"whole": 1.0, "little": 3.0}}
    found = budget._divide_propagated([Part("x", 100.0, 10)], going, [Arrival({"whole": 1.0, "little": 0.01}, 1.0)])
    limit = 0.04 * (1 + 0.03) / 4  # by the way of old, in the mean
    assert found["x"] * (1 + 0.03) / 4 == pytest.approx(max(0.01, limit), rel=0.01)


def total_noise(make: Callable[[], nn.Module], x: Tensor, noise: float, *, blind: bool) -> tuple[float, float, float]:
    """Noise of all weights and the largest of a single one, over 24 steps, and how much less is held."""
    model = make()
    (model(x) - 1).square().sum().backward()
    exact = {name: part.grad.clone() for name, part in model.named_parameters()}
    tide = lowtide.attach(model, "budget", min_size=0, noise=noise, coder="blocks", period=16, flow=not blind)
    errors = dict.fromkeys(exact, 0.0)
    for step in range(72):
        model.zero_grad()
        (model(x) - 1).square().sum().backward()
        for name, part in model.named_parameters():
            errors[name] += float((part.grad - exact[name]).square().sum()) / 24 * (step >= 48)
        tide.step()
    ratio = tide.ledger.raw_peak / tide.ledger.held_peak
    held = sum(entry.raw_nbytes for entry in tide.ledger.sites.values()) / sum(
        entry.held_nbytes for entry in tide.ledger.sites.values()
    )
    tide.detach()
    assert ratio > 1
    energies = {name: float(part.square().sum()) for name, part in exact.items()}
    largest = max(errors[name] / energies[name] for name in exact if exact[name].dim() > 1)
    return sum(errors.values()) / sum(energies.values()), largest, held


def test_a_deep_stream_takes_fewer_bytes_within_the_same_noise() -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    before = total_noise(lambda: Residual(depth=8), x, 0.03, blind=True)
    after = total_noise(lambda: Residual(depth=8), x, 0.03, blind=False)
    assert after[0] < 0.03 and after[1] < 0.06, after
    assert after[2] > 1.15 * before[2], (before, after)


def test_kinds_of_claims_that_end_in_weights_do_not_go_on() -> None:
    budget = Budget(noise=0.01)
    made = site("a:addmm.mat1", (Claim(WEIGHT, 1.0, 1.0),))
    budget._ours.add(made.site)
    statistics = Statistics(0, {made.site: made}, arrivals=(Arrival({}, 1.0),))
    assert set(budget._update(statistics, Any)) == {made.site}  # type: ignore[arg-type]
