"""Compiled graphs on what a GPU would run: kernels of ``sz`` in the emulator, and the ops that only a device has."""

from __future__ import annotations

import sys
from pathlib import Path

import device_ops as device_ops_module
import pytest
import torch
import torch.nn.functional as F
from device_ops import KINDS, attend, batch_norm, device_ops  # noqa: F401
from torch import Tensor, nn

import lowtide

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
from simt import requires_compiler
from test_emulated_training import CASES, as_on_a_gpu, train


@requires_compiler
@pytest.mark.parametrize(("case", "bf16"), [("budget", False), ("rans", True), ("blocks", False), ("remake", False)])
@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_payloads_whose_encoders_report_later(name, case, bf16, monkeypatch, assert_same):
    """Weights are those of plain torch, compiled or not; all that was waiting has been let go."""
    method, options = CASES[case]
    launched = as_on_a_gpu(monkeypatch)
    plain, _ = train(name, method, bf16=bf16, **options)
    compiled, session = train(name, method, bf16=bf16, backend="aot_eager", **options)
    assert_same(plain, compiled)
    assert launched
    assert session.ledger.held == 0


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_a_device(kind, monkeypatch, assert_same):
    """Queries, keys, values and outputs are held in a graph as they are eagerly, under the same names."""

    lay_out = device_ops_module._attend

    def as_a_device_lays_it_out(*given: object) -> tuple[Tensor, Tensor]:
        made, sums = lay_out(*given)
        return made.transpose(1, 2).contiguous().transpose(1, 2), sums

    def without_dropout(*given: Tensor, dropout_p: float = 0.0, **options: bool) -> Tensor:
        return attend(kind, *given, **options)

    monkeypatch.setattr(device_ops_module, "_attend", as_a_device_lays_it_out)
    monkeypatch.setattr(F, "scaled_dot_product_attention", without_dropout)
    results = [train("gpt", "fixed", bf16=False, backend=backend) for backend in (None, "aot_eager")]
    (eager, session), (compiled, session_of_graph) = results
    assert_same(eager, compiled)
    op = f"scaled_dot_product_{kind}_attention"
    names = [{name for name in item.ledger.sites if f":{op}." in name} for item in (session, session_of_graph)]
    coded = {name for name in names[0] if session.ledger.sites[name].codec == "sz"}
    assert len(coded) == 4 * 2, names[0]
    assert all(session_of_graph.ledger.sites[name].codec == "sz" for name in coded)


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize("of_device", [False, True], ids=["cpu", "cudnn"])
def test_a_batch_norm_goes_by_its_eager_name(of_device, monkeypatch, images):
    """torch.compile calls it otherwise than eager code on either device; bounds are found by the eager name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    session = lowtide.attach(model, "budget", optimizer=optimizer, min_size=1024)
    session.compile(backend="aot_eager", fullgraph=True)
    with monkeypatch.context() as patch:
        if of_device:
            patch.setattr(F, "batch_norm", batch_norm)
        model(images).square().sum().backward()  # measured, so not compiled
        optimizer.step()
    before = {name for name in session.ledger.sites if name.startswith("1:")}
    optimizer.zero_grad()
    model(images).square().sum().backward()
    after = {name for name, site in session.ledger.sites.items() if name.startswith("1:") and site.need == "values"}
    assert after == {"1:cudnn_batch_norm.input" if of_device else "1:native_batch_norm.input"} <= before
    assert "1 calls, 1 eager ones" in str(session.report())
    session.detach()
