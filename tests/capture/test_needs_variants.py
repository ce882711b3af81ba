"""One op, several needs: frozen weights, in-place variants, broadcast factors, exponents, masks held as floats."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.records import Kind


@pytest.fixture
def shifted(build):
    """``shifted(function, **children)``: a module that applies function(self, h) to an activation h."""

    def make(function, **children):
        model = build(lambda self, x: function(self, x + self.shift), **children)
        model.shift = nn.Parameter(torch.zeros(()))
        return model

    return make


_LAYERS = {
    "conv": (lambda: nn.Conv2d(8, 8, 3), "convolution.input", "metadata", "values"),
    "conv 1d": (lambda: nn.Conv1d(8, 8, 3), "convolution.input", "metadata", "values"),
    "transposed conv": (lambda: nn.ConvTranspose2d(8, 8, 3), "convolution.input", "metadata", "values"),
    "grouped conv": (lambda: nn.Conv2d(8, 8, 3, groups=8), "convolution.input", "metadata", "values"),
    "strided conv": (lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1), "convolution.input", "metadata", "values"),
    "dilated conv": (lambda: nn.Conv2d(8, 8, 3, dilation=2), "convolution.input", "metadata", "values"),
    "batch norm, evaluated": (lambda: nn.BatchNorm2d(8).eval(), "native_batch_norm.input", "metadata", "values"),
    "batch norm, trained": (lambda: nn.BatchNorm2d(8), "native_batch_norm.input", "values", "values"),
    "linear": (lambda: nn.Linear(8, 8), "addmm.mat1", None, "values"),
    "layer norm": (lambda: nn.LayerNorm(8), "native_layer_norm.input", "values", "values"),
    "group norm": (lambda: nn.GroupNorm(2, 8), "native_group_norm.input", "values", "values"),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("layer", _LAYERS)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_frozen_layers_read_less(shifted, needs, gradients, assert_same, layer, frozen, memory_format):
    """``None``: not saved at all. The second half proves by poison that a frozen conv and norm never look."""
    make, site, *kinds = _LAYERS[layer]
    model = shifted(lambda self, h: self.layer(h), layer=make().requires_grad_(not frozen))
    if layer == "conv 1d":
        x = torch.randn(4, 8, 16)
    elif layer == "linear":
        x = torch.randn(32, 8)
    else:
        x = torch.randn(2, 8, 8, 8).contiguous(memory_format=memory_format)
    seen = {name: item.need.kind.value for name, item in needs(model, x).items()}
    assert seen.get(f"layer:{site}") == kinds[not frozen]
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0, check="full")
    assert_same(plain, gradients(model, x))


def test_an_unscaled_batch_norm_in_evaluation_reads_the_shape_only(shifted, needs):
    model = shifted(lambda self, h: self.norm(h), norm=nn.BatchNorm2d(8, affine=False).eval())
    assert needs(model, torch.randn(2, 8, 8, 8))["norm:native_batch_norm.input"].need.kind is Kind.METADATA


_IN_PLACE = {
    "relu": (F.relu_, "mask"),
    "relu6": (lambda y: F.relu6(y, inplace=True), "mask"),
    "hardtanh": (F.hardtanh_, "mask"),
    "threshold": (lambda y: F.threshold_(y, 0.1, 0.0), "mask"),
    "clamp": (lambda y: y.clamp_(-0.5, 0.5), "mask"),
    "leaky relu": (F.leaky_relu_, "mask"),
    "abs": (torch.abs_, "mask"),
    "hardsigmoid": (lambda y: F.hardsigmoid(y, inplace=True), "mask"),
    "dropout": (lambda y: F.dropout(y, inplace=True), "mask"),
    "elu": (F.elu_, "values"),
    "celu": (F.celu_, "values"),
    "silu": (lambda y: F.silu(y, inplace=True), "values"),
    "tanh": (torch.tanh_, "values"),
    "sigmoid": (torch.sigmoid_, "values"),
}


@pytest.mark.parametrize("op", _IN_PLACE)
def test_in_place_variants(build, needs, gradients, assert_same, op):
    function, kind = _IN_PLACE[op]
    model, x = build(lambda self, x: function(self.linear(x)), linear=nn.Linear(64, 64)), torch.randn(64, 64)
    assert {item.need.kind.value for item in needs(model, x).values()} == {kind}
    plain = gradients(model, x)
    lowtide.attach(model, "exact", check="full")
    assert_same(plain, gradients(model, x))


def test_relu_before_a_convolution_costs_no_tensor_of_its_own(build, gradients, needs):
    """Surprise 39: its mask is the zero code of what the convolution stores; exact, while the values are not."""
    model = build(lambda self, x: self.b(self.a(x).relu()), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 3, 16, 16)
    plain = gradients(model, x)
    session = lowtide.attach(model, "fixed", linear="1 std")
    coded = gradients(model, x)
    sites = {entry.name: entry for entry in session.report().sites}
    assert sites["(model):relu.result"].codec == "in sz"
    assert sites["(model):relu.result"].held_nbytes == 0
    assert all(torch.equal(*pair) for pair in zip(plain[:2], coded[:2], strict=True))  # below the relu: nothing lost
    assert not torch.equal(plain[2], coded[2])


@pytest.mark.parametrize(("kernel", "bits"), [(2, 2), (3, 4)])
def test_pooling_stores_a_place_in_the_window(build, kernel, bits):
    """Surprise 39: nothing of the input, and some bits of each int64 index."""
    model = build(lambda self, x: F.max_pool2d(self.conv(x), kernel), conv=nn.Conv2d(3, 8, 1))
    session = lowtide.attach(model, "exact", check="full")
    output = model(torch.randn(8, 3, 24, 24))
    sites = {entry.name: entry.held_nbytes for entry in session.report().sites}
    assert sites["(model):max_pool2d_with_indices.self"] == 0
    assert sites["(model):max_pool2d_with_indices.result1"] == output.numel() * bits // 8


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_dropout_mask_of_floats_takes_one_bit(build, p):
    model = build(lambda self, x: F.dropout(self.linear(x), p), linear=nn.Linear(64, 64))
    session = lowtide.attach(model, "exact", check="full")
    output = model(torch.randn(64, 64))
    (entry,) = session.report().sites
    assert (entry.name, entry.need, entry.codec) == ("(model):mul.other", "mask", "bitmask")
    assert entry.held_nbytes == 64 * 64 // 8
    assert output.grad_fn._saved_other.unique().tolist() == pytest.approx([0, 1 / (1 - p)])


def test_a_factor_of_other_values_is_not_taken_for_a_mask(build, needs):
    model = build(lambda self, x: self.linear(x) * torch.linspace(0, 1, 4096).view(64, 64), linear=nn.Linear(64, 64))
    item = needs(model, torch.randn(64, 64))["(model):mul.other"]
    assert (item.need.kind, item.need.family, item.need.two_valued) == (Kind.VALUES, "product", False)


@pytest.mark.parametrize("trained", [True, False], ids=["trained factor", "constant factor"])
def test_a_broadcast_factor_is_kept(build, needs, trained):
    """A gate or a statistic for each channel: small, and read by every element of the product."""

    def forward(self, x):
        h = self.conv(x)
        gate = h.mean((2, 3), keepdim=True).sigmoid()
        return h * (gate if trained else gate.detach())

    model = build(forward, conv=nn.Conv2d(3, 8, 1))
    seen = needs(model, torch.randn(4, 3, 8, 8))
    assert seen["(model):mul.other"].need.kind is Kind.EXACT
    if trained:
        assert seen["(model):mul.self"].need.kind is Kind.VALUES


@pytest.mark.parametrize(("exponent", "kind"), [(2, "values"), (3, "values"), (0.5, "exact"), (1.5, "exact")])
def test_powers(shifted, needs, exponent, kind):
    model = shifted(lambda self, h: h**exponent)
    assert needs(model, torch.rand(64, 64) + 0.1)["(model):pow.self"].need.kind.value == kind


def test_a_broken_power_of_small_numbers_has_a_finite_gradient(shifted):
    """h**2.5 is real for h >= 0 alone: a decoded value below zero turns the gradient into NaN."""
    model, x = shifted(lambda self, h: h**2.5), torch.rand(64, 64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this forward saved tensors", lowtide.LowtideWarning)
        lowtide.attach(model)
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("order", [math.inf, -math.inf, 0.5, 1], ids=str)
def test_norms_that_compare_or_divide_are_not_coded_with_loss(shifted, needs, order):
    """Only the Euclidean norm has a gradient that is linear in the values; others ask which is largest, or its sign."""
    model = shifted(lambda self, h: torch.linalg.vector_norm(h, order, dim=1))
    assert needs(model, torch.randn(64, 64))["(model):linalg_vector_norm.self"].need.kind is not Kind.VALUES


class Mul(torch.autograd.Function):
    """A user's own function, with the name of a built-in and another backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.log()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / x


_NORMS_OF_OLD = [(2.0, ["values"]), (1.0, ["exact"]), (3.0, ["exact"])]


@pytest.mark.parametrize(("order", "kinds"), _NORMS_OF_OLD)
def test_distances_of_pairs(shifted, needs, order, kinds):
    """They take the older op for norms: only the Euclidean one is linear in the values."""
    model = shifted(lambda self, h: F.pairwise_distance(h, 2 * h, p=order))
    seen = needs(model, torch.randn(16, 8))
    assert [item.need.kind.value for name, item in seen.items() if name.endswith("norm.self")] == kinds


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "prod"])
def test_reductions_by_index(shifted, needs, gradients, assert_same, reduce):
    """Messages that nodes of a graph are sent: of sums and means backward reads the shape, of all others values."""
    to = torch.randint(0, 8, (32,))

    def function(self, h):
        zeros, wide = torch.zeros(8, 4), to[:, None].expand_as(h)
        return zeros.scatter_reduce(0, wide, h, reduce, include_self=False)

    model, x = shifted(function), torch.randn(32, 4)
    (kind,) = {item.need.kind for name, item in needs(model, x).items() if not name.endswith("index")}
    assert kind is (Kind.METADATA if reduce in ("sum", "mean") else Kind.EXACT)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0, check="full")
    assert_same(plain, gradients(model, x))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_samples_at_given_places(shifted, needs, gradients, assert_same, mode, padding):
    """Where the places have no gradient, backward reads nothing of what was sampled there."""
    places = torch.rand(2, 5, 6, 2) * 2.4 - 1.2
    model = shifted(lambda self, h: F.grid_sample(h, places, mode, padding, align_corners=False))
    x = torch.randn(2, 3, 8, 8)
    kinds = {name.rsplit(".")[-1]: item.need.kind for name, item in needs(model, x).items()}
    assert kinds == {"input": Kind.METADATA, "grid": Kind.EXACT}
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0, check="full")
    assert_same(plain, gradients(model, x))


@pytest.mark.parametrize("form", ["lerp", "addcmul"])
def test_a_factor_that_is_broadcast_into_a_mixture_is_kept(shifted, needs, form):
    mix = {"lerp": lambda h, w: torch.lerp(h, h + 1, w), "addcmul": lambda h, w: torch.addcmul(h, h + 1, w)}[form]
    seen = needs(shifted(lambda self, h: mix(h, h.mean(0))), torch.randn(16, 8))
    kinds = {name.rpartition(".")[2]: item.need.kind for name, item in seen.items() if form in name}
    assert kinds.pop("weight" if form == "lerp" else "tensor2") is Kind.EXACT
    assert set(kinds.values()) == {Kind.VALUES}


def test_a_custom_function_never_takes_the_row_of_a_built_in(shifted, needs):
    model = shifted(lambda self, h: Mul.apply(h.abs() + 1))
    item = needs(model, torch.randn(64, 64))["(model):custom.mul.tensors[0]"]
    assert (item.need.kind, item.need.family) == (Kind.EXACT, "unknown")


def test_a_grouped_product_of_two_stacks_is_kept(shifted, needs):
    """No weight is in sight: neither factor is a layer's input."""
    found = needs(shifted(lambda self, h: F.grouped_mm(h[0], h[1]) * 1), torch.randn(2, 8, 16, 16))
    kinds = {name: item.need.kind for name, item in found.items() if "grouped_mm" in name}
    assert kinds == dict.fromkeys(("(model):grouped_mm.self", "(model):grouped_mm.mat2"), Kind.EXACT)


def test_an_unknown_op_is_kept_and_says_so(shifted):
    model = shifted(lambda self, h: torch.logcumsumexp(h, 1).tanh())
    session = lowtide.attach(model)
    model(torch.randn(64, 64)).sum().backward()
    (entry,) = [entry for entry in session.report().sites if "logcumsumexp.self" in entry.name]
    assert (entry.codec, entry.need) == ("kept", "exact")
    assert entry.reason == "op logcumsumexp is not in the table of needs"


def test_integers_and_statistics_say_why(build):
    model = build(lambda self, x: self.norm(self.linear(x)).topk(4)[0], linear=nn.Linear(64, 64), norm=nn.LayerNorm(64))
    session = lowtide.attach(model, min_size=0)
    model(torch.randn(64, 64)).sum().backward()
    reasons = {entry.name: entry.reason for entry in session.report().sites}
    assert reasons["(model):topk.indices"] == "integers"
    assert reasons["norm:native_layer_norm.result1"] == "statistic or state of native_layer_norm"


def test_a_bound_for_rows_is_not_taken_for_a_bound_for_columns(build, node):
    """A square tensor and its transpose are one stretch of memory, and their rows have different spreads."""
    scales = torch.logspace(-3, 3, 64)

    def forward(self, x):
        h = self.linear(x) * scales
        return self.rows(h).sum() + self.columns(h.t()).sum()

    model = build(forward, linear=nn.Linear(64, 64), rows=nn.LayerNorm(64), columns=nn.LayerNorm(64))
    x = torch.randn(64, 64)
    lowtide.attach(model, min_size=0)
    saved = [edge[0].next_functions[0][0]._saved_input for edge in model(x).grad_fn.next_functions]
    h = (model.linear(x) * scales).detach()
    for decoded, original in zip(saved, (h, h.t()), strict=True):
        bound = 0.4 * original.std(1, correction=0, keepdim=True)
        assert ((decoded - original).abs() <= bound * (1 + 1e-5)).all()
