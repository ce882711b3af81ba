"""What backward gets: changes in place, repeated reads, dtype and strides, ambient modes, random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.codecs.sz import Sz
from lowtide.errors import ModifiedError, PayloadError

CHANGED = "modified by an inplace operation"


@pytest.mark.parametrize("min_size", [0, 1 << 20], ids=["kept by the method", "too small"])
def test_changing_a_kept_tensor_is_still_an_error(build, min_size):
    """Surprise 7: with hooks autograd checks no versions, so an alias would give a wrong gradient, silently."""
    model = build(lambda self, x: self.linear(x).sigmoid(), linear=nn.Linear(64, 64))
    lowtide.attach(model, "exact", min_size=min_size)
    output = model(torch.randn(64, 64))
    with torch.no_grad():
        output.mul_(2)
    with pytest.raises(ModifiedError, match=r"inplace operation: .* is at version 1; expected version 0 .*Hint: clone"):
        output.sum().backward()


@pytest.mark.parametrize("attached", [False, True])
def test_the_error_is_the_one_of_stock_autograd(build, attached):
    """Code that catches RuntimeError goes on working."""
    model = build(lambda self, x: self.linear(x).sigmoid(), linear=nn.Linear(8, 8))
    if attached:
        lowtide.attach(model, "exact", min_size=0)
    output = model(torch.randn(8, 8))
    with torch.no_grad():
        output.mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        output.sum().backward()


def test_changing_an_input_or_a_weight_is_still_an_error():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8)
    lowtide.attach(model, "exact", min_size=0)
    for victim in (x, model[1].weight):
        output = model(x)
        with torch.no_grad():
            victim.mul_(2)
        with pytest.raises(ModifiedError, match=CHANGED):
            output.sum().backward()


def test_changing_a_coded_tensor_leaves_its_gradient_right(build, gradients, assert_same):
    """A payload is made at the save: what happens to the tensor afterwards does not matter (stock would raise)."""
    hidden = []

    def forward(self, x):
        hidden.append(self.a(x).tanh())
        return self.b(hidden[-1])

    model, x = build(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 64)), torch.randn(64, 64)
    plain = gradients(model, x)

    def spoil(module, inputs, output):
        with torch.no_grad():
            hidden[-1].zero_()

    lowtide.attach(model, rules=[{"codec": "identity"}])
    model.register_forward_hook(spoil)  # after Lowtide's own, which has coded everything
    assert_same(plain, gradients(model, x))


def test_changing_a_tensor_before_it_is_coded_is_an_error(build):
    """A save waits until its op is known; a change in that gap cannot be taken back, so backward says so."""
    model = build(lambda self, x: self.linear(x).sigmoid().mul_(2), linear=nn.Linear(64, 64))
    session = lowtide.attach(model, "exact")
    output = model(torch.randn(64, 64))
    assert "changed in place after it was saved" in session.report().to_dict()["left_alone"]
    with pytest.raises(ModifiedError, match=CHANGED):
        output.sum().backward()


def test_unpack_runs_once_for_every_read(build):
    """Surprise 9: two backwards and a look at the node decode again and again, to the same values."""
    model = build(lambda self, x: self.b(self.a(x).tanh()).sigmoid(), a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    session = lowtide.attach(model, check="full")
    output = model(torch.randn(64, 64))
    weights = torch.randn(64, 64)
    held = session.ledger.held
    first = torch.autograd.grad(output, list(model.parameters()), weights, retain_graph=True)
    assert torch.equal(output.grad_fn._saved_result, output.grad_fn._saved_result)
    assert session.ledger.held == held
    second = torch.autograd.grad(output, list(model.parameters()), weights)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert session.ledger.held == 0


def test_unpack_order_is_free(build, node):
    """Surprise 9: nothing is a stack; the oldest save can be read first, alone, and before its op is known."""
    seen = []

    def forward(self, x):
        y = self.a(x).tanh()
        seen.append(torch.equal(y.grad_fn._saved_result, y))  # not coded yet
        y = self.b(y)
        return self.c(y.tanh())

    model = build(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 64), c=nn.Linear(64, 64))
    lowtide.attach(model, rules=[{"codec": "identity"}])
    x = torch.randn(64, 64)
    output = model(x)
    oldest = node(output, "AddmmBackward0").next_functions[1][0].next_functions[0][0].next_functions[1][0]
    assert seen == [True]
    assert torch.equal(oldest._saved_result, model.a(x).tanh())
    output.sum().backward()


def test_a_decoded_tensor_of_the_wrong_dtype_is_refused(monkeypatch):
    """Surprise 10: autograd takes any tensor from unpack, of any dtype, and computes on."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    lowtide.attach(model)
    output = model(torch.randn(64, 64))
    decode = Sz.decode
    monkeypatch.setattr(Sz, "decode", lambda self, encoded: decode(self, encoded).half())
    message = r"2:addmm.mat1: decoded a torch.float16 tensor of shape \(64, 64\) on cpu, saved was torch.float32"
    with pytest.raises(PayloadError, match=message):
        output.sum().backward()


def test_a_decoded_tensor_of_a_broadcastable_shape_is_refused(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    lowtide.attach(model)
    output = model(torch.randn(64, 64))
    decode = Sz.decode
    monkeypatch.setattr(Sz, "decode", lambda self, encoded: decode(self, encoded)[:1].clone())
    with pytest.raises((PayloadError, RuntimeError), match=r"shape|out of bounds"):
        output.sum().backward()


@pytest.mark.parametrize("method", ["exact", "fixed"])
def test_strides_survive(build, node, method):
    """Surprise 12: a channels_last tensor that came back contiguous would make the backward of a conv slow."""
    model = build(lambda self, x: self.b(self.a(x).relu()), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 3))
    model = model.to(memory_format=torch.channels_last)
    lowtide.attach(model, method, min_size=0, check="full")
    output = model(torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last))
    for name, field in (("ConvolutionBackward0", "input"), ("ReluBackward0", "result")):
        saved = getattr(node(output, name), f"_saved_{field}")
        assert saved.is_contiguous(memory_format=torch.channels_last)
        assert not saved.is_contiguous()


def test_a_view_with_gaps_keeps_the_order_of_its_axes(build, node):
    """Surprise 12: heads are transposed views; packed, they still lie as attention kernels want them."""

    def forward(self, x):
        q, k, v = (part.view(2, 32, 4, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)

    model = build(forward, qkv=nn.Linear(64, 192))
    lowtide.attach(model, check="full")
    saved = node(model(torch.randn(2, 32, 64)), "ScaledDotProductFlashAttentionForCpuBackward0")
    for tensor in (saved._saved_query, saved._saved_key, saved._saved_value):
        assert tensor.shape == (2, 4, 32, 16)
        assert tensor.stride() == (2048, 16, 64, 1)  # (batch, head, token, feature), token before head


def test_autocast_does_not_reach_the_codec(build, node):
    """Surprise 13: autocast is on inside pack; a bound that is a statistic must not be computed in bf16."""
    model = build(lambda self, x: (x * self.scale).tanh().sin().sum())
    model.scale = nn.Parameter(torch.ones(()))
    x = torch.randn(64, 64)
    saved = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            session = lowtide.attach(model, check="full")
            saved.append(node(model(x), "TanhBackward0")._saved_result)
            session.detach()
    assert saved[0].dtype == torch.float32
    assert torch.equal(*saved)


def test_a_codec_that_multiplies_matrices_is_not_recast(build, monkeypatch):
    seen = []
    encode = Sz.encode

    def spy(self, x, bound=None, **options):
        seen.append((x[:2, :2].float() @ x[:2, :2].float()).dtype)
        return encode(self, x, bound, **options)

    monkeypatch.setattr(Sz, "encode", spy)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    lowtide.attach(model, min_size=4096)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(64, 64))
    assert set(seen) == {torch.float32}


def test_grad_mode_is_on_inside_unpack_with_create_graph(build, node, monkeypatch):
    """Surprise 13: decoding must not become part of the graph that a double backward differentiates."""
    modes = []
    decode = Sz.decode
    monkeypatch.setattr(Sz, "decode", lambda self, e: modes.append(torch.is_grad_enabled()) or decode(self, e))
    model = build(lambda self, x: self.b(self.a(x).tanh()).sigmoid(), a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    lowtide.attach(model, min_size=4096)
    x = torch.randn(64, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert modes
    assert not any(modes)
    assert gradient.requires_grad


def test_double_backward_is_exact(build, gradients, assert_same):
    def forward(self, x):
        hidden = self.b(self.a(x).relu().tanh()).sigmoid()
        (gradient,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        return hidden.sum(1) + gradient.square().sum(1)

    model = build(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0, check="full")
    assert_same(plain, gradients(model, x))
    assert "saved during backward" in session.report().to_dict()["left_alone"]
    assert session.ledger.held == session.ledger.raw == 0


@pytest.mark.parametrize("method", ["exact", "fixed"])
def test_random_numbers_of_the_model_stay_its_own(method):
    """Surprise 14: dither has its own seeds; one draw from the global generator would change every dropout mask."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Tanh(), nn.Linear(64, 64), nn.Dropout())
    x = torch.randn(64, 64)

    def run():
        torch.manual_seed(3)
        output = model(x)
        output.sum().backward()
        return output.detach(), torch.get_rng_state()

    output, state = run()
    lowtide.attach(model, method, min_size=0, check="full")
    again, after = run()
    assert torch.equal(output, again)
    assert torch.equal(state, after)
