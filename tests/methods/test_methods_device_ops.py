"""Models on the ops that they would run on a GPU, which have other nodes and other fields than those of a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from device_ops import KINDS, attend, batch_norm, device_ops  # noqa: F401
from torch import Tensor
from zoo_training import assert_goes_well, train

import lowtide
from lowtide.app import zoo
from lowtide.registry import METHODS

pytestmark = pytest.mark.usefixtures("device_ops")

OF_MODEL = {"gpt": "flash", "vit_b_16": "efficient", "encoder": "cudnn", "resnet18": "", "vgg16": ""}


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models call the ops of a device; dropout of probabilities is left out, as there is no kernel for it here."""

    def without_dropout(*given: Tensor, dropout_p: float = 0.0, **options: bool) -> Tensor:
        return attend(kind, *given, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", without_dropout)
    monkeypatch.setattr(F, "batch_norm", batch_norm)


def run(name: str, method: str | None) -> tuple[list[Tensor], list[str]]:
    """Gradients of the last of some steps, and what saves are held by: "op.field codec". None is plain training."""
    entry = zoo.describe(name)
    torch.manual_seed(0)
    model = entry.build(**entry.tiny)
    inputs, target = entry.example(4, **entry.tiny)
    session = lowtide.attach(model, method, min_size=0) if method else None
    for _ in range(3):
        model.zero_grad()
        entry.loss(model(inputs), target).backward()
        if session is not None:
            session.step()
    sites = session.ledger.sites.items() if session is not None else ()
    held = [f"{name.partition(':')[2]} {entry.codec}" for name, entry in sites]
    return [part.grad for part in model.parameters() if part.grad is not None], held


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_named_and_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(kind, monkeypatch)
    _, held = run("gpt", "budget")
    op = f"scaled_dot_product_{kind}_attention"
    assert {of for of in held if of.startswith(op) and of.endswith(" sz")} == {
        f"{op}.{field} sz" for field in ("query", "key", "value")
    }
    assert f"{op}.output again by attention" in held


def test_batch_norm_is_named_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    use("flash", monkeypatch)
    _, held = run("resnet18", "budget")
    assert {of for of in held if "batch_norm.input" in of} == {"cudnn_batch_norm.input sz"}


@pytest.mark.parametrize("name", OF_MODEL)
def test_exact_is_bit_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(OF_MODEL[name] or "flash", monkeypatch)
    (exact, held), (plain, _) = run(name, "exact"), run(name, None)
    assert held
    assert all(torch.equal(a, b) for a, b in zip(exact, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS.names())
@pytest.mark.parametrize("name", OF_MODEL)
def test_twenty_steps(name: str, method: str, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(OF_MODEL[name] or "flash", monkeypatch)
    assert_goes_well(train(name, method, bf16=bf16))


@pytest.mark.parametrize("name", OF_MODEL)
def test_twenty_steps_by_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(OF_MODEL[name] or "flash", monkeypatch)
    assert_goes_well(train(name, "budget", bf16=True))
