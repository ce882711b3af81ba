"""Models of the zoo, compiled: what an eager session does, to the bit, with the same bytes held."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from torch import Tensor

from lowtide.app import zoo

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
from test_emulated_training import train

_QUICK = ("alexnet", "resnet18", "vit_ti_16", "gpt", "llama", "unet")


def _train(name: str, method: str, *, backend: str | None, bf16: bool) -> tuple[list[Tensor], int, set[str]]:
    """Weights after some steps, the bytes held, and the names of what was held other than as it is."""
    weights, session = train(name, method, bf16=bf16, backend=backend, min_size=1024)
    coded = {name for name, site in session.ledger.sites.items() if site.need in ("values", "mask", "window")}
    return weights, session.ledger.held_peak, coded


def _models() -> list[object]:
    """Not those that are recurrent, or whose dropout rounds otherwise; and not Llama in bf16, where autocast casts one
    tensor for several layers: eagerly each cast is stored, in a graph they are one."""
    names = [name for name in zoo.names() if name not in ("lstm", "gpt2_small")]
    cases = [(name, bf16) for name in names for bf16 in (False, True) if not (bf16 and "llama" in name)]
    return [pytest.param(*case, marks=() if case[0] in _QUICK else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "bf16"), _models())
def test_weights_are_those_of_an_eager_session(name: str, bf16: bool, assert_same) -> None:
    eager, held, coded = _train(name, "fixed", backend=None, bf16=bf16)
    compiled, held_by_graph, coded_in_graph = _train(name, "fixed", backend="aot_eager", bf16=bf16)
    assert_same(eager, compiled)
    # Dropout goes by another name, and a mask of bytes; statistics of norms count where their buffers are small.
    assert {site for site in coded ^ coded_in_graph if "dropout" not in site and ":mul." not in site} == set()
    assert held_by_graph <= 1.05 * held


@pytest.mark.parametrize("name", ["resnet18", "gpt", "llama"])
def test_bounds_that_set_themselves(name: str, assert_same) -> None:
    """Steps 0, 2 and 4 are measured, so they run eagerly; the others are compiled, with what was learned in those."""
    eager, held, coded = _train(name, "budget", backend=None, bf16=False)
    compiled, held_by_graph, coded_in_graph = _train(name, "budget", backend="aot_eager", bf16=False)
    assert_same(eager, compiled)
    assert coded == coded_in_graph
    assert held_by_graph <= 1.05 * held


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor has no C++ compiler here")
@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("gpt", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt", True), ("resnet18", False), ("unet", True))),
        *(pytest.param("vit_ti_16", bf16, marks=pytest.mark.slow) for bf16 in (False, True)),
    ],
)
def test_inductor(name: str, bf16: bool) -> None:
    """Sums run in another order, so that only the noise is the same, and what is held."""
    plain, _, _ = _train(name, "exact", backend=None, bf16=bf16)
    eager, held, coded = _train(name, "fixed", backend=None, bf16=bf16)
    compiled, held_by_graph, coded_in_graph = _train(name, "fixed", backend="inductor", bf16=bf16)
    assert {site for site in coded_in_graph - coded if "dropout" not in site} == set()
    assert held_by_graph <= 1.05 * held
    noise, noise_in_graph = _distance(eager, plain), _distance(compiled, plain)
    assert noise_in_graph < 3 * noise + 1e-6, (noise_in_graph, noise)


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    return sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True))
