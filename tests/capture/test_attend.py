"""Attention is run again in backward: what it made is not stored, but made of the very values that backward reads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_ops import KINDS, attend, device_ops  # noqa: F401
from torch import Tensor, nn

import lowtide
from lowtide.capture.attend import Attention
from lowtide.session import Session

HEADS, SIZE = 4, 16
WIDTH = HEADS * SIZE
TORCHS = "torch's own"


class Block(nn.Module):
    """``kind`` of kernel; keys have a mean, which no exact gradient sees."""

    def __init__(self, kind: str = TORCHS, shared: int = HEADS, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.shared, self.options = kind, shared, options
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, shared * SIZE), nn.Linear(WIDTH, shared * SIZE)
        nn.init.constant_(self.key.bias, 1.5)
        self.is_copied = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        query, key, value = (
            layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.is_copied:
            query = query.contiguous()
        options = {"enable_gqa": True, **self.options} if self.shared < HEADS else self.options
        if self.kind == TORCHS:
            y = F.scaled_dot_product_attention(query, key, value, **options)
        else:
            y = attend(self.kind, query, key, value, **self.options)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def make_input(length: int = 24) -> Tensor:
    return torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    (model(x * 1.0) - 1).square().sum().backward()
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def noise(found: dict[str, Tensor], exact: dict[str, Tensor], *names: str) -> float:
    """Of some weights together, or of all. (The bias of keys has no gradient at all.)"""
    errors = sum(float((found[name] - exact[name]).square().sum()) for name in names or exact)
    return errors / sum(float(exact[name].square().sum()) for name in names or exact)


def codec_of_output(session: Session) -> str:
    return next(entry.codec for name, entry in session.ledger.sites.items() if name.endswith("attention.output")
                or name.endswith("attention_for_cpu.output"))  # fmt: skip


@contextmanager
def attached(model: nn.Module, **options: Any) -> Iterator[Session]:
    given = {"method": "fixed", "remake": True, "coder": "blocks", "attention": "0.3 std", **options}
    if given["method"] != "fixed":
        given = options
    session = lowtide.attach(model, given.pop("method"), min_size=0, **given)
    yield session
    session.detach()


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize("kind", [TORCHS, *KINDS])
def test_nothing_is_held_of_what_it_made_and_noise_is_lower(kind: str) -> None:
    """Means over 20 draws, under the same bounds: where the output is stored, errors meet the mean of the keys."""
    model, x = Block(kind, is_causal=True), make_input()
    exact, found = gradients(model, x), {}
    for remake in (False, True):
        with attached(model, remake=remake) as session:
            drawn = [gradients(model, x) for _ in range(20)]
            held = {name: entry.held_nbytes for name, entry in session.ledger.sites.items()}
            made = [name for name, entry in session.ledger.sites.items() if entry.codec == "again by attention"]
        found[remake] = sum(noise(each, exact, "query.weight", "key.weight") for each in drawn) / len(drawn), held
        assert len(made) == 2 * remake, "attention's own save and that of the layer behind it"
        assert not any(held[name] for name in made)
    assert found[True][0] < 0.7 * found[False][0], found
    assert sum(found[True][1].values()) < 0.85 * sum(found[False][1].values())


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize("kind", [TORCHS, *KINDS])
def test_of_exact_inputs_it_makes_the_same_bits(kind: str) -> None:
    model, x = Block(kind, is_causal=True), make_input()
    exact = gradients(model, x)
    with attached(model, method="exact", remake=True, check=True) as session:
        assert all(torch.equal(part, exact[name]) for name, part in gradients(model, x).items())
        assert codec_of_output(session) == "again by attention"


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TORCHS, {"is_causal": True, "scale": 0.4}),
        (TORCHS, {"attn_mask": torch.randn(24, 24)}),
        (TORCHS, {"attn_mask": torch.rand(3, 1, 24, 24) < 0.8}),
        ("efficient", {"attn_mask": torch.randn(24, 24)}),
        ("cudnn", {"attn_mask": torch.randn(24, 24), "scale": 0.4}),
        ("flash", {"scale": 0.4}),
    ],
)
def test_it_is_told_what_it_was_told(kind: str, options: dict[str, Any]) -> None:
    """Under bounds so fine that every gradient is exact but for a millionth: masks, biases, scales count."""
    model, x = Block(kind, **options), make_input()
    exact = gradients(model, x)
    with attached(model, attention="0.002 std", linear="0.002 std") as session:
        found = gradients(model, x)
        assert codec_of_output(session) == "again by attention"
    assert noise(found, exact) < 1e-4


def test_keys_that_several_heads_share() -> None:
    model, x = Block(shared=2, is_causal=True), make_input()
    exact = gradients(model, x)
    with attached(model, attention="0.002 std", linear="0.002 std") as session:
        found = gradients(model, x)
        assert codec_of_output(session) == "again by attention"
    assert noise(found, exact) < 1e-4


def test_it_is_run_once_for_both_who_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, runs, run = Block(is_causal=True), make_input(), [], Attention.run

    def count(self: Attention, *given: Any) -> Tensor:
        runs.append(self.op)
        return run(self, *given)

    monkeypatch.setattr(Attention, "run", count)
    with attached(model):
        loss = model(x * 1.0).square().sum()
        loss.backward(retain_graph=True)
        assert len(runs) == 1
        first = [part.grad.clone() for part in model.parameters()]
        model.zero_grad()
        loss.backward()
        assert len(runs) == 2, "and once more for a second backward"
        assert all(torch.equal(part.grad, before) for part, before in zip(model.parameters(), first, strict=True))


def test_what_is_lent_dies_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of the layer behind it alone: attention's own backward never asks."""
    model, x, made, run = Block(is_causal=True), make_input(), [], Attention.run

    def watch(self: Attention, *given: Any) -> Tensor:
        tensor = run(self, *given)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Attention, "run", watch)
    with attached(model):
        loss = model(x * 1.0).square().sum()
        torch.autograd.grad(loss, model.out.weight)
        assert len(made) == 1
        del loss
        gc.collect()
        assert made[0]() is None


@pytest.mark.parametrize("why", ["dropout", "long", "copied"])
def test_it_is_stored_where(why: str) -> None:
    """It dropped probabilities, which cannot be drawn again; it would take long; what it made was copied, so that there
    are two tensors."""
    model = Block(is_causal=why != "long")
    model.is_copied = why == "copied"
    if why == "dropout":
        model.options["dropout_p"] = 0.1
    x = make_input(2 * WIDTH + 1 if why == "long" else 24)
    exact = gradients(model, x)
    with attached(model, attention="0.01 std", linear="0.01 std") as session:
        found = gradients(model, x)
        codecs = {name.rpartition(":")[2]: entry.codec for name, entry in session.ledger.sites.items()}
    assert "again by attention" not in codecs.values()
    assert noise(found, exact) < 1e-2


def test_as_long_as_that_it_is_not() -> None:
    model = Block()
    with attached(model) as session:
        gradients(model, make_input(2 * WIDTH))
        assert codec_of_output(session) == "again by attention"


def test_a_rule_of_the_users_comes_first() -> None:
    model = Block(is_causal=True)
    with attached(model, rules=[{"op": "*attention*", "field": "output", "bound": "0.2 std"}]) as session:
        gradients(model, make_input())
        assert codec_of_output(session) == "sz"


def test_under_autocast() -> None:
    model, x = Block(is_causal=True), make_input()
    with torch.autocast("cpu", torch.bfloat16):
        exact = gradients(model, x)
        with attached(model, attention="0.05 std", linear="0.05 std") as session:
            found = gradients(model, x)
            assert codec_of_output(session) == "again by attention"
    assert noise(found, exact) < 0.02


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize("kind", [TORCHS, *KINDS])
def test_budget_keeps_weights_to_their_share(kind: str) -> None:
    """Also that of the layer behind attention, whose input has what errors of queries, keys and values make of it.

    Ten draws after the bounds have settled; a weight may see 0.0225 of its own input and, where it makes queries, keys
    or values, a sixteenth of 0.03 from each of these."""
    model, x = Block(kind, is_causal=True), make_input()
    exact = gradients(model, x)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with attached(model, method="budget", optimizer=optimizer, coder="blocks") as session:
        drawn = []
        for step in range(60):
            found = gradients(model, x)
            optimizer.step()
            drawn += [found] if step >= 50 else []
        assert codec_of_output(session) == "again by attention"
        reported = session.report().noise
    for name in ("query.weight", "key.weight", "value.weight", "out.weight"):
        assert sum(noise(each, exact, name) for each in drawn) / len(drawn) < 0.04, name
    assert any("out:addmm" in site for site in reported)
