"""Attention that is run again, by the kernels of a device: the same bits of exact inputs, less noise of stored ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from no_waiting import no_waiting
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.capture.attend import Attention
from lowtide.session import Session

# Backward of some kernels cannot repeat itself, and says so.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*determinis.*")]

WIDTH, HEADS = 256, 4
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
KIND = pytest.mark.parametrize("kind", KERNELS)


class Net(nn.Module):
    """Keys have a mean, which no exact gradient sees."""

    def __init__(self, kind: str, shared: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.kernel, self.options, self.sizes = KERNELS[kind], options, (HEADS, shared, shared)
        self.stem, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reads = nn.ModuleList(nn.Linear(WIDTH, heads * WIDTH // HEADS) for heads in self.sizes)
        nn.init.constant_(self.reads[1].bias, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        query, key, value = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in zip(self.reads, self.sizes, strict=True)
        )
        with sdpa_kernel(self.kernel):
            y = F.scaled_dot_product_attention(query, key, value, **self.options)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def make(kind: str, **options: Any) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    model = Net(kind, **options).cuda()
    x = torch.randn(4, 192, WIDTH, device="cuda")
    try:
        gradients(model, x)
    except RuntimeError as error:
        pytest.skip(f"no {kind} attention for this here: {error}")
    return model, x


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x * 1.0)
    (y.float() - 1).square().sum().backward()
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def noise(found: dict[str, Tensor], exact: dict[str, Tensor], *names: str) -> float:
    """Of some weights together, or of all."""
    errors = sum(float((found[name] - exact[name]).double().square().sum()) for name in names or exact)
    return errors / sum(float(exact[name].double().square().sum()) for name in names or exact)


@contextmanager
def attached(model: nn.Module, method: str, **options: Any) -> Iterator[Session]:
    session = lowtide.attach(model, method, min_size=0, **options)
    yield session
    session.detach()


def made_again(session: Session) -> list[str]:
    return [name for name, entry in session.ledger.sites.items() if entry.codec == "again by attention"]


@KIND
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.05}], ids=str)
def test_of_exact_inputs_it_makes_the_same_bits(kind: str, options: dict[str, Any]) -> None:
    """Backward's own kernels may add up in any order: so it is its input that is compared."""
    model, x = make(kind, **options)
    made: list[tuple[Tensor, Tensor]] = []
    run = Attention.run

    def watch(self: Attention, *given: Any) -> Tensor:
        tensor = run(self, *given)
        made.append((tensor, outputs[-1]))
        return tensor

    outputs: list[Tensor] = []
    hook = model.out.register_forward_pre_hook(lambda _, given: outputs.append(given[0].detach().clone()))
    with pytest.MonkeyPatch.context() as patch, attached(model, "exact", remake=True) as session:
        patch.setattr(Attention, "run", watch)
        gradients(model, x)
        assert len(made_again(session)) == 2
    hook.remove()
    ((again, before),) = made
    assert torch.equal(again.flatten(), before.flatten())


@KIND
@pytest.mark.parametrize("shared", [HEADS, 1])
def test_of_stored_inputs_there_is_less_noise(kind: str, shared: int) -> None:
    """In the weights of queries and keys, which see the centre of a row's scores; elsewhere little changes."""
    model, x = make(kind, is_causal=True, **({"shared": shared, "enable_gqa": True} if shared < HEADS else {}))
    exact, found = gradients(model, x), []
    for remake in (False, True):
        with attached(model, "fixed", remake=remake, attention="0.3 std") as session:
            drawn = [gradients(model, x) for _ in range(8)]
            again = len(made_again(session))
            assert again in ((2, 0) if shared < HEADS and remake else (2 * remake,))
        scores = sum(noise(each, exact, "reads.0.weight", "reads.1.weight") for each in drawn) / len(drawn)
        found.append((scores, sum(noise(each, exact) for each in drawn) / len(drawn), again))
    assert found[1][1] < 1.2 * found[0][1], found
    assert found[1][0] < 0.7 * found[0][0] or not found[1][2], found


@KIND
def test_under_budget(kind: str) -> None:
    model, x = make(kind, is_causal=True)
    exact = gradients(model, x)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with attached(model, "budget", optimizer=optimizer) as session:
        for _ in range(20):
            found = gradients(model, x)
            optimizer.step()
        assert len(made_again(session)) == 2
        with no_waiting():
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                y = model(x * 1.0)
            (y.float() - 1).square().sum().backward()
    assert noise(found, exact) < 0.06
