"""v * S is the added variance: each formula against errors that were drawn."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from disturbed import BOUND, VARIANCE, measured
from torch import Tensor, nn

from lowtide.capture import sensitivity
from lowtide.capture.producer import Producer
from lowtide.capture.spot import SpotCheck
from lowtide.capture.sums import Arrived
from lowtide.records import Site
from lowtide.statistics import BELOW, PROPAGATED, SCALE, WEIGHT


def relu(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).sub(0.3).relu()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def predicted(
    op: str,
    field: str,
    family: str,
    y: Tensor,
    gy: Tensor,
    x: Tensor,
    variances: Tensor | None = None,
    *,
    even: bool = False,
) -> dict[str, float]:
    """v * S of each gradient, from the node that made ``y`` and what backward makes of ``gy``."""
    node = y.grad_fn
    with torch.no_grad():
        probes = sensitivity.probes(Site("", op, field), family, node, x.detach(), even=even)
        grads = node(gy, *[None] * (len(node._input_metadata) - 1))
        grads = grads if isinstance(grads, tuple) else (grads,)
        felt = Arrived(gy) if variances is None else Arrived(gy).felt(variances)
        return {probe.kind: VARIANCE * float(probe.measure(grads, felt)) for probe in probes}


CONVOLUTIONS = {
    "3x3": (relu(4, 16, 9, 9), (12, 16, 3, 3), {"padding": 1}),
    "3x3, stride 2": (relu(4, 16, 9, 9), (12, 16, 3, 3), {"padding": 1, "stride": 2}),
    "1x1": (relu(4, 16, 6, 6), (12, 16, 1, 1), {}),
    "1x1, stride 2, padding": (relu(4, 16, 9, 9), (12, 16, 1, 1), {"padding": 1, "stride": 2}),
    "3x1": (relu(4, 16, 9, 9), (12, 16, 3, 1), {"padding": (1, 0), "stride": (1, 2)}),
    "groups, dilation": (relu(4, 16, 9, 9), (12, 8, 3, 3), {"padding": 2, "groups": 2, "dilation": 2}),
    "1-d": (relu(6, 16, 20), (12, 16, 5), {"padding": 2}),
    "3-d": (relu(2, 16, 5, 5, 5), (12, 16, 3, 3, 3), {"padding": 1}),
    "depthwise": (normal(4, 16, 9, 9), (16, 1, 3, 3), {"padding": 1, "groups": 16}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case):
    x, shape, options = CONVOLUTIONS[case]
    weight = normal(*shape).requires_grad_()
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    y = convolve(x, weight, **options)
    gy = torch.randn_like(y) * torch.rand(y.shape[0], y.shape[1], *[1] * (y.dim() - 2), dtype=torch.float64)

    def gradient(values: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(convolve(values, weight, **options), weight, gy)[0]

    expected = predicted("convolution", "input", "linear", y, gy, x)[WEIGHT]
    assert measured(gradient, x, 1.0, 60) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("groups", [1, 2])
def test_windows_count_by_what_is_in_them(groups):
    """gY is large where x is sparse: the mean number of non-zeros would predict far more noise."""
    x, weight = relu(4, 16, 12, 12), normal(12, 16 // groups, 3, 3).requires_grad_()
    x[..., :6] *= torch.rand(4, 16, 12, 6) < 0.1
    y = F.conv2d(x, weight, padding=1, groups=groups)
    gy = torch.randn_like(y)
    gy[..., 5:] *= 0.02

    def gradient(values: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(F.conv2d(values, weight, padding=1, groups=groups), weight, gy)[0]

    expected = predicted("convolution", "input", "linear", y, gy, x)[WEIGHT]
    evenly = VARIANCE * float(gy.square().sum() * (x != 0).double().mean()) * 9 * 16 / groups
    found = measured(gradient, x, 1.0, 100)
    assert found == pytest.approx(expected, rel=0.05)
    assert evenly > 3 * found


@pytest.mark.parametrize("options", [{"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2}], ids=str)
def test_transposed_convolution(options):
    x, weight = relu(4, 16, 6, 6), normal(16, 10, 3, 3).requires_grad_()
    y = F.conv_transpose2d(x, weight, **options)
    gy = torch.randn_like(y)

    def gradient(values: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(F.conv_transpose2d(values, weight, **options), weight, gy)[0]

    expected = predicted("convolution", "input", "linear", y, gy, x)[WEIGHT]
    assert measured(gradient, x, 1.0, 60) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("values", [relu, normal])
def test_linear(values):
    """Rows with more non-zeros, or larger gradients, count more: no mean over rows would do."""
    x, weight = values(48, 32), normal(24, 32).requires_grad_()
    x[:16, :28] = 0
    gy = normal(48, 24) * torch.rand(48, 1, dtype=torch.float64)
    gy[:16] *= 3
    bias = normal(24).requires_grad_()
    y = F.linear(x, weight, bias)
    expected = predicted("addmm", "mat1", "linear", y, gy, x)[WEIGHT]
    assert measured(lambda values: gy.t() @ values, x, 1.0, 200) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("kind", ["alike", "uneven", "behind ReLU", "even"])
def test_batch_norm(kind):
    """Errors are alike in units of each channel's spread; or a tenth where values are above the mean; or so and gY is
    zero where they are not; or errors are of one size in all channels."""
    x = normal(16, 12, 6, 6) * torch.rand(1, 12, 1, 1).add(0.3) + normal(1, 12, 1, 1)
    x = x.detach().requires_grad_()
    norm = nn.BatchNorm2d(12).double()
    with torch.no_grad():
        norm.weight.copy_(normal(12))
    y = norm(x)
    mean, std = x.detach().mean((0, 2, 3), keepdim=True), x.detach().std((0, 2, 3), keepdim=True, correction=0)
    gy = torch.randn_like(y) + 0.3 * normal(1, 12, 1, 1) * (x.detach() - mean)
    unit = std * torch.where(x.detach() > mean, 0.1, 1.0) if kind in ("uneven", "behind ReLU") else std
    if kind == "behind ReLU":
        gy = gy * (x.detach() > mean)
    variances = (unit / std).square() if kind in ("uneven", "behind ReLU") else None
    unit = torch.ones_like(unit) if kind == "even" else unit
    found = predicted("native_batch_norm", "input", "norm", y, gy, x, variances, even=kind == "even")
    node = y.grad_fn

    def backward(values: Tensor, mask: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_batch_norm_backward(
            gy, values, norm.weight, None, None, node._saved_result1, node._saved_result2, True, norm.eps, mask
        )

    at = x.detach()
    scale = measured(lambda values: backward(values, (False, True, False))[1], at, unit, 1000)
    onward = measured(lambda values: backward(values, (True, False, False))[0], at, unit, 200)
    assert scale == pytest.approx(found[SCALE], rel=0.1)
    assert onward == pytest.approx(found[PROPAGATED], rel=0.05)


@pytest.mark.parametrize("even", [False, True], ids=["by channel", "even"])
@pytest.mark.parametrize("kind", ["convolution", "linear"])
def test_the_weight_below_a_batch_norm(kind, even):
    """One number for a whole channel is wrong, and its weight's gradient shows it: the energy of gX does not."""
    if kind == "convolution":
        x, weight, op, field = relu(24, 16, 8, 8), normal(12, 16, 3, 3), "convolution", "input"
        apply = partial(F.conv2d, padding=1)
    else:
        x, weight, op, field = relu(600, 40), normal(12, 40), "mm", "self"
        apply = F.linear
    weight = nn.Parameter(weight * torch.linspace(0.7, 1.5, 12).view(-1, *[1] * (weight.dim() - 1)))
    hidden = apply(x, weight)
    norm = (nn.BatchNorm2d if kind == "convolution" else nn.BatchNorm1d)(12).double()
    y = norm(hidden)
    gy = torch.randn_like(y)
    node, below, at = y.grad_fn, hidden.grad_fn, hidden.detach()
    producer = Producer.of(Site("", op, field), below, x)
    with torch.no_grad():
        probes = sensitivity.probes(Site("", "native_batch_norm", "input"), "norm", node, at, producer, even=even)
        probe = next(probe for probe in probes if probe.kind == BELOW)
        expected = VARIANCE * float(probe.measure((), Arrived(gy)))
    assert probe.weight is weight

    def gradient(values: Tensor) -> Tensor:
        (gx, _, _) = torch.ops.aten.native_batch_norm_backward(
            gy, values, norm.weight, None, None, node._saved_result1, node._saved_result2, True, norm.eps,
            (True, False, False),
        )  # fmt: skip
        with torch.enable_grad():
            return torch.autograd.grad(apply(x, weight), weight, gx)[0]

    std = at.std([axis for axis in range(at.dim()) if axis != 1], keepdim=True, correction=0)
    std = torch.ones_like(std) if even else std
    assert measured(gradient, at, std, 400) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("even", [False, True], ids=["by row", "even"])
@pytest.mark.parametrize("scaled", [True, False])
def test_layer_norm(scaled, even):
    x = (normal(40, 48) * torch.rand(40, 1).add(0.2)).detach().requires_grad_()
    norm = nn.LayerNorm(48, elementwise_affine=scaled).double()
    y = norm(x)
    std = x.detach().std(1, keepdim=True, correction=0)
    gy = torch.randn_like(y) + 0.3 * x.detach() / std
    std = torch.ones_like(std) if even else std
    found = predicted("native_layer_norm", "input", "norm", y, gy, x, even=even)
    node = y.grad_fn

    def backward(values: Tensor, mask: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_layer_norm_backward(
            gy, values, [48], node._saved_result1, node._saved_result2, norm.weight, norm.bias, mask
        )

    at = x.detach()
    onward = measured(lambda values: backward(values, (True, False, False))[0], at, std, 400)
    assert onward == pytest.approx(found[PROPAGATED], rel=0.05)
    assert (SCALE in found) == scaled
    if scaled:
        scale = measured(lambda values: backward(values, (False, True, False))[1], at, std, 1000)
        assert scale == pytest.approx(found[SCALE], rel=0.1)


@pytest.mark.parametrize("even", [False, True], ids=["by row", "even"])
def test_group_norm(even):
    """Channels of one spread: then a bound by channel and sample is the group's too."""
    x = (normal(6, 8, 10, 10) * torch.rand(6, 1, 1, 1).add(0.2)).detach().requires_grad_()
    norm = nn.GroupNorm(2, 8).double()
    y = norm(x)
    std = x.detach().std((2, 3), keepdim=True, correction=0)
    gy = torch.randn_like(y) + 0.3 * x.detach() / std
    std = torch.ones_like(std) if even else std
    found = predicted("native_group_norm", "input", "norm", y, gy, x, even=even)
    node = y.grad_fn

    def backward(values: Tensor, mask: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_group_norm_backward(
            gy, values, node._saved_result1, node._saved_result2, norm.weight, 6, 8, 100, 2, mask
        )

    at = x.detach()
    scale = measured(lambda values: backward(values, (False, True, False))[1], at, std, 1000)
    onward = measured(lambda values: backward(values, (True, False, False))[0], at, std, 200)
    assert scale == pytest.approx(found[SCALE], rel=0.15)
    assert onward == pytest.approx(found[PROPAGATED], rel=0.1)


def test_rows_that_are_sent_to_experts():
    x, weight = relu(60, 32).float().requires_grad_(), normal(3, 48, 32).float().requires_grad_()
    offsets = torch.tensor([11, 35, 60], dtype=torch.int32)

    def run(values: Tensor) -> Tensor:
        return F.grouped_mm(values, weight.transpose(-2, -1), offs=offsets)

    y = run(x)
    gy = torch.randn_like(y)
    with torch.no_grad():
        site = Site("", "grouped_mm", "self")
        (probe,) = sensitivity.probes(site, "linear", y.grad_fn, x.detach())
        expected = VARIANCE * float(probe.measure((), Arrived(gy)))
        assert Producer.of(site, y.grad_fn, x.detach()) is None

    def gradient(values: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(run(values), weight, gy)[0]

    assert probe.kind == WEIGHT
    assert measured(gradient, x.detach(), 1.0, 100) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("op", "field", "lossy"), [("bmm", "self", 0), ("bmm", "mat2", 1), ("mul", "self", 0), ("mul", "other", 1)]
)
def test_products(op, field, lossy):
    shapes = ((4, 20, 12), (4, 12, 18)) if op == "bmm" else ((40, 20, 12), (40, 20, 12))
    factors = [relu(*shape).requires_grad_() for shape in shapes]
    function = getattr(torch, op)
    y = function(*factors)
    gy = torch.randn_like(y)
    found = predicted(op, field, "product", y, gy, factors[lossy])

    def gradient(values: Tensor) -> Tensor:
        given = [values if index == lossy else factor for index, factor in enumerate(factors)]
        with torch.enable_grad():
            return torch.autograd.grad(function(*given), given[1 - lossy], gy)[0]

    assert measured(gradient, factors[lossy].detach(), 1.0, 60) == pytest.approx(found[PROPAGATED], rel=0.08)


def test_what_has_no_formula_has_no_probe():
    y = normal(4, 8).requires_grad_().softmax(1)
    assert sensitivity.probes(Site("", "flash_attention", "query"), "attention", y.grad_fn, y.detach()) == []
    assert sensitivity.probes(Site("", "cumsum", "self"), "pointwise", y.grad_fn, y.detach()) == []


@pytest.mark.parametrize(
    "op", ["convolution", "addmm", "native_batch_norm", "native_layer_norm", "even batch norm", "even layer norm"]
)
def test_a_spot_check_finds_the_variance(op, monkeypatch):
    """Of a part of the tensor, with the real gradient: the variance that the errors were drawn with."""
    monkeypatch.setattr("lowtide.capture.spot._ENOUGH", 8000)
    if op == "convolution":
        x, module, field = relu(8, 16, 10, 10), nn.Conv2d(16, 24, 3, padding=1, stride=2), "input"
    elif op == "addmm":
        x, module, field = relu(200, 64), nn.Linear(64, 48), "mat1"
    elif "batch" in op:
        x, module, field = normal(8, 128, 6, 6) * torch.rand(1, 128, 1, 1).add(0.1), nn.BatchNorm2d(128), "input"
    else:
        x, module, field = normal(4, 50, 128) * torch.rand(4, 50, 1).add(0.1), nn.LayerNorm(128), "input"
    op, even = op.replace("even ", "native_").replace(" ", "_"), op.startswith("even")
    y = module.double()(x.requires_grad_())
    gy, x = torch.randn_like(y), x.detach()
    with torch.no_grad():
        check = SpotCheck.of(Site("", op, field), y.grad_fn, x, even=even)
    unit = 1.0
    if "norm" in op and not even:
        over = (0, 2, 3) if op == "native_batch_norm" else (2,)
        unit = x.std(over, keepdim=True, correction=0)
    assert check.part.numel() < x.numel()
    found = [float(check.variance(x + (torch.rand_like(x) * 2 - 1) * BOUND * unit * (x != 0), gy)) for _ in range(40)]
    assert sum(found) / 40 == pytest.approx(VARIANCE, rel=0.1)
    assert float(check.variance(x, gy)) == 0.0
    assert float(check.variance(x, torch.zeros_like(gy))) == 0.0, "no gradient is no noise"
    assert not float(check.variance(x, gy * torch.inf)) < torch.inf
