"""Pointwise functions, quotients and reductions: v * S against errors that were drawn, and no op without a formula."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from disturbed import VARIANCE, Disturbed, measured
from torch import Tensor

from lowtide.capture import attention, needs, pointwise, products, sensitivity
from lowtide.capture.sums import Arrived
from lowtide.records import Kind, Site
from lowtide.statistics import PROPAGATED


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


POINTWISE = [
    ("gelu", F.gelu),
    ("gelu", lambda x: F.gelu(x, approximate="tanh")),
    ("silu", F.silu),
    ("softplus", lambda x: F.softplus(x, 2.0)),
    ("tanh", torch.tanh),
    ("sigmoid", torch.sigmoid),
    ("sin", torch.sin),
    ("cos", torch.cos),
    ("erf", torch.erf),
    ("mish", F.mish),
    ("hardswish", lambda x: F.hardswish(x / 2)),
    ("elu", F.elu),
    ("elu", lambda x: F.elu(x * 1, inplace=True)),
    ("celu", lambda x: F.celu(x, 0.7)),
    ("celu", lambda x: F.celu(x * 1, 0.7, inplace=True)),
    ("pow", lambda x: x**3),
    ("pow", lambda x: x**4),
    ("glu", lambda x: F.glu(x, 0)),
    ("glu", lambda x: F.glu(x, -1)),
]


def check(run: Disturbed, op: str, field: str, family: str, *, draws: int) -> None:
    """Errors in what was saved as ``field`` add the variance that is predicted, to 8 %."""
    saved = run.saved[field]
    expected, edge = predicted(run, op, field, family)
    found = measured(lambda values: run.gradients(field, values - saved)[edge], saved, 1.0, draws)
    assert found == pytest.approx(expected, rel=0.08)


@torch.no_grad()
def predicted(run: Disturbed, op: str, field: str, family: str) -> tuple[float, int]:
    """v * S, and which gradient is meant."""
    (probe,) = sensitivity.probes(Site("", op, field), family, run.node, run.saved[field])
    assert probe.kind == PROPAGATED
    return VARIANCE * float(probe.measure(run.gradients(), Arrived(run.gy))), probe.edge


@pytest.mark.parametrize(("op", "function"), POINTWISE, ids=[f"{op}-{n}" for n, (op, _) in enumerate(POINTWISE)])
def test_pointwise(op, function):
    x = normal(400, 50).requires_grad_()
    run = Disturbed(lambda: function(x))
    assert needs.snake(needs.op_of(type(run.node).__name__)) == op
    (field,) = run.saved
    check(run, op, field, "pointwise", draws=10)


def test_log_sigmoid():
    """A GPU computes the slope from the input; a CPU from what it saves beside, so that errors of the input do less."""
    x = normal(20000).requires_grad_()
    run = Disturbed(lambda: F.logsigmoid(x))
    check(run, "log_sigmoid", "buffer", "pointwise", draws=10)
    found, _ = predicted(run, "log_sigmoid", "self", "pointwise")
    assert measured(lambda at: run.gy * torch.sigmoid(-at), x.detach(), 1.0, 10) == pytest.approx(found, rel=0.08)


def test_a_slope_that_jumps():
    """SELU's at zero: counted as under a bound of 0.15 std, whatever the bound."""
    x = normal(200_000).requires_grad_()
    run = Disturbed(lambda: F.selu(x))
    found = predicted(run, "elu", "self", "pointwise")[0] / VARIANCE
    for bound, least, most in ((0.15, 0.85, 1.15), (0.6, 2.0, 5.0), (0.05, 0.25, 0.6)):
        error = (torch.rand_like(x) * 2 - 1).detach() * bound
        noise = float((run.gradients("self", error)[0] - run.gradients()[0]).square().sum())
        assert least < found * bound**2 / 3 / noise < most


def test_slopes_that_differ_from_channel_to_channel():
    """PReLU's: the formula has their mean jump."""
    x, weight = normal(200, 4, 250).requires_grad_(), torch.tensor([0.0, 0.25, 0.5, -0.5], dtype=torch.float64)
    run = Disturbed(lambda: F.prelu(x, weight.requires_grad_()))
    found, edge = predicted(run, "prelu_kernel", "self", "pointwise")
    error = (torch.rand_like(x) * 2 - 1).detach() * 0.15
    noise = float((run.gradients("self", error)[edge] - run.gradients()[edge]).square().sum())
    assert found / VARIANCE * 0.15**2 / 3 == pytest.approx(noise, rel=0.1)


def at_places(x: Tensor, places: Tensor, *, align_corners: bool = False) -> Tensor:
    return F.grid_sample(x, places.tanh() * 0.9, align_corners=align_corners)


PRODUCTS = {
    "div.self": lambda x, y: x / (y.square() + 1),
    "div.self, broadcast": lambda x, y: x / (y.square().sum(1, keepdim=True) + 1),
    "var.self": lambda x, y: x.var(1),
    "var.self, all": lambda x, y: x.var(correction=0),
    "var_mean.self": lambda x, y: torch.var_mean(x, 0)[0],
    "linalg_vector_norm.self": lambda x, y: torch.linalg.vector_norm(x, dim=1),
    "linalg_vector_norm.self, kept": lambda x, y: torch.linalg.vector_norm(x, dim=(0, 1), keepdim=True),
    "std.self": lambda x, y: x.std(1),
    "std.self, all": lambda x, y: x.std(correction=0),
    "std_mean.self": lambda x, y: torch.std_mean(x, 0)[0],
    "norm.self": lambda x, y: torch.ops.aten.norm(x, 2.0, [1]),
    "addcmul.tensor1": lambda x, y: torch.addcmul(x, x + 1, y, value=0.5),
    "addcmul.tensor2": lambda x, y: torch.addcmul(x, x + 1, y, value=0.5),
    "lerp.self": lambda x, y: torch.lerp(x, x + 1, y),
    "lerp.end": lambda x, y: torch.lerp(x, x + 1, y),
    "lerp.weight": lambda x, y: torch.lerp(x, x + 1, y),
    "grid_sampler2d.input": lambda x, y: at_places(x.view(4, 3, 20, 40), y.flatten()[:4800].view(4, 30, 20, 2)),
    "grid_sampler2d.input, corners": lambda x, y: at_places(
        x.view(4, 3, 20, 40), y.flatten()[:4800].view(4, 30, 20, 2), align_corners=True
    ),
    "grid_sampler3d.input": lambda x, y: at_places(x.view(4, 3, 8, 10, 10), y.flatten()[:9000].view(4, 30, 5, 5, 3)),
    "mse_loss.self": F.mse_loss,
    "mse_loss.target": F.mse_loss,
    "mse_loss.self, sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse_loss.self, none": lambda x, y: F.mse_loss(x, y.detach(), reduction="none"),
    "mse_loss.target, none": lambda x, y: F.mse_loss(x.detach(), y, reduction="none"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_quotients_and_reductions(name):
    x, y = normal(120, 80).requires_grad_(), normal(120, 80).requires_grad_()
    op, field = name.split(",")[0].split(".")
    check(Disturbed(lambda: PRODUCTS[name](x, y)), op, field, "product", draws=60)


@pytest.mark.parametrize(
    ("op", "family", "function"),
    [
        ("elu", "pointwise", F.selu),
        ("hardswish", "pointwise", lambda x: F.hardswish(x + 3)),
        ("pow", "pointwise", lambda x: (x + 1e4) ** 10),
        ("div", "product", lambda x: (x + 1) / torch.zeros(64, 64).requires_grad_()),
        ("linalg_vector_norm", "product", lambda x: torch.linalg.vector_norm(x, dim=1)),
    ],
)
def test_numbers_stay_finite(op, family, function):
    """One that is not would keep all sites of the step from being learnt from."""
    run = Disturbed(lambda: function(torch.zeros(64, 64).requires_grad_()))
    assert math.isfinite(predicted(run, op, "self", family)[0])


def test_a_divisor_of_half_precision():
    """Its square is beyond the range of its dtype."""
    other = torch.full((200, 50), 2000.0, dtype=torch.float16).requires_grad_()
    run = Disturbed(lambda: torch.randn(200, 50).half().requires_grad_() / other)
    found = predicted(run, "div", "self", "product")[0]
    assert found == pytest.approx(VARIANCE * float(run.gy.double().square().sum()) / 2000.0**4, rel=0.01)


def test_every_kind_of_values_has_a_formula():
    """Whatever the table lets a codec touch, `budget` can tell what errors in it do; named are the exceptions."""
    without = {"flash_attention", "efficient_attention", "cudnn_attention", "matmul", "log_softmax"}
    lossy = {
        (needs.snake(op), field)
        for op, reader in needs.TABLE.items()
        if isinstance(reader, Mapping)
        for field, need in reader.items()
        if need.kind is Kind.VALUES
    }
    known = set(pointwise._CURVATURES) | set(products._FACTORS) | set(products._REDUCTIONS) | {("glu", "self")}
    known |= {(op, field) for op, field in lossy if attention.is_attention(op, field)}
    known |= {("softmax", "result"), ("safe_softmax", "result"), ("native_group_norm", "input")}
    assert {op for op, field in lossy - known} == without
