"""Attention: what errors in stored queries, keys, values and outputs do to torch's own backward, and under `budget`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_ops import KINDS, attend, device_ops  # noqa: F401
from disturbed import Disturbed
from torch import Tensor, nn

import lowtide
from lowtide.capture import attention, sensitivity
from lowtide.capture.sums import Arrived
from lowtide.records import Site
from lowtide.statistics import PROPAGATED

OPS = {"ForCpu": "scaled_dot_product_flash_attention_for_cpu"}
OPS |= {kind: f"scaled_dot_product_{kind}_attention" for kind in KINDS}
FIELDS = ("query", "key", "value", "output")


def tensors(sharpness: float = 1.0, shared: int = 4, length: int = 24) -> dict[str, Tensor]:
    """(batch, heads, length, features); keys have a mean, which no exact gradient sees."""
    made = torch.Generator().manual_seed(0)
    shapes = {"query": (3, 4, length, 8), "key": (3, shared, length, 8), "value": (3, shared, length, 8)}
    found = {name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in shapes.items()}
    found["query"] *= sharpness
    found["key"] += 0.5
    return found


def call_of(kind: str) -> Callable[..., Tensor]:
    return F.scaled_dot_product_attention if kind == "ForCpu" else partial(attend, kind)


class Attention(Disturbed):
    """Torch's own, and what an error in one of its tensors does to the worst of three gradients, as a share."""

    def __init__(self, saved: dict[str, Tensor], kind: str = "ForCpu", **options: Any) -> None:
        inputs = [saved[name].clone().requires_grad_() for name in FIELDS[:3]]
        self._op = OPS[kind]
        super().__init__(lambda: call_of(kind)(*inputs, **options))

    def share(self, field: str, spread: float, draws: int = 60) -> float:
        """Added variance over energy, for errors of variance one."""
        exact, x = self.gradients(), self.saved[field]
        shares = torch.zeros(3, dtype=torch.float64)
        for _ in range(draws):
            error = (torch.rand_like(x) * 2 - 1) * 3**0.5 * spread
            for n, (a, b) in enumerate(zip(exact[:3], self.gradients(field, error)[:3], strict=True)):
                shares[n] += float((b - a).square().sum() / a.square().sum()) / draws
        return float(shares.max()) / spread**2

    @torch.no_grad()
    def predicted(self, field: str) -> float:
        grads = self.gradients()
        (probe,) = sensitivity.probes(Site("", self._op, field), "attention", self.node, self.saved[field])
        assert probe.kind == PROPAGATED
        return float(probe.measure(grads, Arrived(self.gy)) / grads[probe.edge].square().sum())


CASES: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "plain": (tensors(), {}),
    "causal": (tensors(), {"is_causal": True}),
    "sharp": (tensors(6), {"is_causal": True}),
    "scaled": (tensors(), {"scale": 0.9}),
    "masked": (tensors(), {"attn_mask": torch.randn(24, 24, generator=torch.Generator().manual_seed(2)).double()}),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("case", CASES)
def test_of_torchs_own_backward(case: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_SAMPLES", 3)
    torch.manual_seed(0)
    saved, options = CASES[case]
    run = Attention(saved, **options)
    assert type(run.y.grad_fn).__name__ == "ScaledDotProductFlashAttentionForCpuBackward0"
    assert run.predicted(field) == pytest.approx(run.share(field, 0.003), rel=0.3)


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("kind", "case"), [*((kind, "causal") for kind in KINDS), ("efficient", "masked"), ("cudnn", "masked")]
)
def test_of_the_ops_of_a_device(kind: str, case: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors under other nodes, with other fields: what is found of them is the same."""
    saved, options = CASES[case]
    monkeypatch.setattr(attention, "_SAMPLES", 3)
    run = Attention(saved, kind, **options)
    assert type(run.node).__name__ == f"ScaledDotProduct{kind.title()}AttentionBackward0"
    assert run.predicted(field) == pytest.approx(Attention(saved, **options).predicted(field), rel=1e-6)


@pytest.mark.parametrize("field", FIELDS)
def test_some_rows_tell_enough(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over few queries average less, so that noise is taken for larger than it is, never for far smaller."""
    run = Attention(tensors(2, length=64), is_causal=True)
    whole = run.predicted(field)
    monkeypatch.setattr(attention, "_ENTRIES", 4 * 64 * 16)
    assert 0.4 * whole < run.predicted(field) < 4 * whole


def test_sharp_attention_asks_for_finer_keys() -> None:
    saved = tensors()
    flat, sharp = Attention(saved), Attention({**saved, "query": 8 * saved["query"]})
    assert sharp.predicted("key") > 20 * flat.predicted("key")


def test_the_part_is_shared_by_the_four_and_holds_no_more_than_samples() -> None:
    run = Attention(tensors())
    node = run.y.grad_fn
    measures = [attention.measure_attention(node, field) for field in FIELDS]
    (part,) = attention._RECENT.values()
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in part.saved.values())
    del part, measures
    assert not attention._RECENT


def test_rows_that_see_nothing_do_no_harm() -> None:
    mask = torch.zeros(24, 24, dtype=torch.float64)
    mask[3] = -torch.inf
    run = Attention(tensors(), attn_mask=mask)
    run.gy[:, :, 3] = 0
    assert run.predicted("key") < float("inf")


@pytest.mark.parametrize("dim", [-1, 1])
def test_softmax(dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 20, 24, dtype=torch.float64).mul(3).requires_grad_()
    y = torch.softmax(x.masked_fill(torch.rand(x.shape) < 0.3, -torch.inf), dim)
    gy = torch.randn_like(y) + 0.5
    exact = y.detach()

    def backward(y: Tensor) -> Tensor:
        return y * (gy - (gy * y).sum(dim, keepdim=True))

    found, spread = 0.0, 1e-3
    for _ in range(40):
        error = (torch.rand_like(exact) * 2 - 1) * 3**0.5 * spread * (exact != 0)
        found += float((backward(exact + error) - backward(exact)).square().sum()) / 40 / spread**2
    (probe,) = sensitivity.probes(Site("", "softmax", "result"), "pointwise", y.grad_fn, exact)
    assert float(probe.measure((None,), Arrived(gy))) == pytest.approx(found, rel=0.1)


class Sharp(nn.Module):
    """Two blocks of attention whose scores have a spread of about ten."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._attend = call_of(kind)
        self.inner = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        with torch.no_grad():
            for layer in self.inner:
                layer.weight[:64] *= 6

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            query, key, value = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in inner(x).chunk(3, -1))
            y = self._attend(query, key, value, is_causal=True)
            x = x + outer(y.transpose(1, 2).flatten(2))
        return x


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("kind", OPS)
def test_sharp_attention_under_budget(kind: str, steps: int) -> None:
    """Probabilities are rebuilt from stored queries and keys: under bounds that only follow their spread, the error of
    the gradient was thousands of times the gradient."""
    torch.manual_seed(0)
    model, x, y = Sharp(kind), torch.randn(8, 48, 32), torch.randn(8, 48, 32)

    def gradients(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        return [part.grad.clone() for part in model.parameters() if part.grad is not None]

    exact = gradients(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    tide = lowtide.attach(model, "budget", optimizer=optimizer, min_size=0)
    for _ in range(steps):
        gradients(model)
        optimizer.step()
    lossy = gradients(model)
    held = [entry.codec for name, entry in tide.ledger.sites.items() if "attention" in name]
    assert held.count("sz") >= 6, held
    energy = sum(float(part.square().sum()) for part in exact)
    assert sum(float((a - b).square().sum()) for a, b in zip(exact, lossy, strict=True)) < 0.06 * energy


def backward(saved: dict[str, Tensor], sums: Tensor, gy: Tensor) -> list[Tensor]:
    """By the book, with the output of these very values; sums are those of forward."""
    query, key, value = (saved[name] for name in FIELDS[:3])
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    chances = torch.exp((query @ key.mT / query.shape[-1] ** 0.5).masked_fill(later, -torch.inf) - sums[..., None])
    slope = chances * (gy @ value.mT - (gy * out).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
    return [slope @ key, slope.mT @ query, chances.mT @ gy]


@pytest.mark.parametrize("sharpness", [1, 4])
@pytest.mark.parametrize("field", FIELDS[:3])
def test_where_the_output_is_made_again(field: str, sharpness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 draws. Errors meet no mean of the keys: what those of values do falls to less than a half."""
    monkeypatch.setattr(attention, "_SAMPLES", 3)
    torch.manual_seed(0)
    saved = tensors(sharpness)
    run = Attention(saved, is_causal=True)
    sums, grads = run.saved["logsumexp"], run.gradients()
    exact, spread, shares = backward(saved, sums, run.gy), 0.003, torch.zeros(3, dtype=torch.float64)
    assert all(torch.allclose(a, b) for a, b in zip(exact, grads[:3], strict=True))
    for _ in range(60):
        error = (torch.rand_like(saved[field]) * 2 - 1) * 3**0.5 * spread
        for n, part in enumerate(backward({**saved, field: saved[field] + error}, sums, run.gy)):
            shares[n] += float((part - exact[n]).square().sum() / exact[n].square().sum()) / 60 / spread**2
    measure = attention.measure_attention(run.node, field, again=True)
    assert measure is not None and attention.measure_attention(run.node, "output", again=True) is None
    edge = attention.edge_of(run.node)
    with torch.no_grad():
        predicted = float(measure(grads, Arrived(run.gy)) / grads[edge].square().sum())
    assert predicted == pytest.approx(float(shares.max()), rel=0.3)
    if field == "value":
        assert predicted < 0.5 * run.predicted(field)


@pytest.mark.parametrize("case", CASES)
def test_errors_of_what_is_made_again(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 draws of each, against one."""
    monkeypatch.setattr(attention, "_SAMPLES", 3)
    torch.manual_seed(0)
    saved, options = CASES[case]
    exact = F.scaled_dot_product_attention(*saved.values(), **options)
    found = attention.slopes(
        saved, options.get("scale"), is_causal=options.get("is_causal", False), bias=options.get("attn_mask")
    )
    for field, slope in zip(FIELDS, found, strict=False):
        mean = 0.0
        for _ in range(60):
            error = (torch.rand_like(saved[field]) * 2 - 1) * 3**0.5 * 0.003
            other = F.scaled_dot_product_attention(*{**saved, field: saved[field] + error}.values(), **options)
            mean += float((other - exact).square().mean()) / 60 / 0.003**2
        assert float(slope) == pytest.approx(mean, rel=0.15), field
