"""What arrives at a pack hook and is no activation: weights, their views and casts, buffers, integers, statistics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import Rule


def test_linear_saves_a_view_of_its_weight(build, node):
    """Surprise 1: ``weight.t()`` is no Parameter; it must stay an alias of the weight, and cost nothing."""
    model = build(lambda self, x: self.second(self.first(x)), first=nn.Linear(64, 64), second=nn.Linear(64, 64))
    session = lowtide.attach(model, min_size=0)
    output = model(torch.randn(64, 64))
    assert node(output, "AddmmBackward0")._saved_mat2.data_ptr() == model.second.weight.data_ptr()
    assert [entry.name for entry in session.report().sites] == ["second:addmm.mat1"]
    assert session.ledger.raw == 64 * 64 * 4  # the input of ``second``; nothing for weights


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trained", "frozen"])
def test_weights_of_every_layer_stay_aliases(build, node, requires_grad):
    model = build(lambda self, x: self.conv(x * self.scale), conv=nn.Conv2d(8, 8, 3).requires_grad_(requires_grad))
    model.scale = nn.Parameter(torch.ones(8, 1, 1))
    session = lowtide.attach(model, min_size=0)
    output = model(torch.randn(2, 8, 8, 8))
    assert node(output, "ConvolutionBackward0")._saved_weight.data_ptr() == model.conv.weight.data_ptr()
    assert [entry.name for entry in session.report().sites] == ["conv:convolution.input"]


def test_autocast_casts_of_weights_are_made_again(build, gradients, assert_same):
    """Surprise 2: a cast weight is an ordinary bf16 tensor. It is recast in backward: exact, and nothing is held."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(self.conv(x).flatten(1)).float()

    model = build(forward, conv=nn.Conv2d(4, 8, 3, padding=1), linear=nn.Linear(512, 64))
    x = torch.randn(4, 4, 8, 8, requires_grad=True)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
    kept = {entry.name: entry.held_nbytes for entry in session.report().sites}
    # bf16 copies of the input (4 x 4 x 8 x 8) and of the conv's output (4 x 512); neither weight
    assert kept == {"conv:convolution.input": 2048, "linear:addmm.mat1": 4096}


class _Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)

    def forward(self, x):
        return x @ self.weight


_FROZEN = {
    "linear": (nn.Linear, (64, 64), (32, 64), "AddmmBackward0", "mat2", lambda weight: weight.t()),
    "convolution": (nn.Conv2d, (64, 64, 3), (2, 64, 6, 6), "ConvolutionBackward0", "weight", lambda weight: weight),
    "product": (_Projection, (), (32, 64), "MmBackward0", "mat2", lambda weight: weight),
}


@pytest.mark.parametrize("case", _FROZEN)
def test_autocast_casts_of_frozen_weights_stay_exact(build, node, case):
    """Surprise 2: a frozen weight's cast is a leaf without any trace of the weight. It must not be coded with loss.

    A layer's own is made again; in a module of the user's own it may be anything, and is kept.
    """
    layer, args, shape, name, field, view = _FROZEN[case]

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer((x * self.scale).tanh())

    model = build(forward, layer=layer(*args).requires_grad_(False))
    model.scale = nn.Parameter(torch.ones(()))
    session = lowtide.attach(model, min_size=0)
    output = model(torch.randn(shape))
    assert torch.equal(getattr(node(output, name), f"_saved_{field}"), view(model.layer.weight.bfloat16()))
    assert ("cast of a frozen weight" in session.report().to_dict()["left_alone"]) == (case == "product")


def test_batch_norm_hands_over_its_buffers(build, node):
    """Surprise 3: running statistics are module buffers: aliases that cost nothing."""
    model = build(lambda self, x: self.norm(x * self.scale), norm=nn.BatchNorm2d(2048))
    model.scale = nn.Parameter(torch.ones(()))
    session = lowtide.attach(model)
    output = model(torch.randn(2, 2048, 2, 2))
    saved = node(output, "NativeBatchNormBackward0")
    assert saved._saved_running_mean.data_ptr() == model.norm.running_mean.data_ptr()
    assert saved._saved_running_var.data_ptr() == model.norm.running_var.data_ptr()
    # of the norm's own: its input and two statistics; of the mul: its input is the caller's
    assert session.ledger.raw == 4 * (2 * 2048 * 4 + 2 * 2048)


def test_batch_norm_in_evaluation_saves_empty_tensors(gradients, assert_same):
    """Surprise 3: in evaluation mode two of the saved tensors have no elements."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0, check="full")
    assert_same(plain, gradients(model, x))


def test_masks_indices_and_targets_come_back_exact(build, node):
    """Surprise 4: integers and booleans pass through pack like anything else."""

    def forward(self, tokens, targets):
        top, _ = self.embed(tokens).topk(16)
        top = top.masked_fill(top < 0, 0.0)
        return F.nll_loss(self.head(top).log_softmax(-1).flatten(0, 1), targets.flatten(), reduction="none")

    model = build(forward, embed=nn.Embedding(50, 32), head=nn.Linear(16, 10))
    tokens, targets = torch.randint(50, (8, 16)), torch.randint(10, (8, 16))
    plain = model(tokens, targets)
    lowtide.attach(model, min_size=0, rules=[Rule(codec="sz", bound="2 std")])
    coded = model(tokens, targets)
    names = {"EmbeddingBackward0": "indices", "TopkBackward0": "indices", "MaskedFillBackward0": "mask"}
    for name, field in {**names, "NllLossBackward0": "target"}.items():
        expected, got = (getattr(node(output, name), f"_saved_{field}") for output in (plain, coded))
        assert not expected.is_floating_point()
        assert torch.equal(expected, got), f"{name}.{field}"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_read_with_their_workspace(build, gradients, assert_same, kind):
    """Surprise 4: an LSTM's byte workspace belongs to its exact outputs; a rule for everything changes neither."""
    model = build(lambda self, x: self.rnn(x * self.scale)[0], rnn=kind(32, 32, batch_first=True))
    model.scale = nn.Parameter(torch.ones(()))
    x = torch.randn(8, 16, 32, requires_grad=True)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))


def test_a_rule_for_everything_does_not_reach_the_workspace(build, gradients, assert_same):
    model = build(lambda self, x: self.rnn(self.rnn(x)[0])[0], rnn=nn.LSTM(32, 32, batch_first=True))
    x = torch.randn(8, 16, 32, requires_grad=True)
    plain = gradients(model, x)
    with pytest.warns(lowtide.LowtideWarning, match="compressed none"):
        session = lowtide.attach(model, min_size=0, rules=[Rule(codec="sz", bound="2 std")])
        assert_same(plain, gradients(model, x))
    assert {entry.codec for entry in session.report().sites} == {"kept"}


def test_logsumexp_of_attention_is_exact(build, node):
    """Surprise 5: probabilities are rebuilt as exp(score - logsumexp), so an error in it would be exponentiated."""

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)

    model, x = build(forward, qkv=nn.Linear(64, 192)), torch.randn(2, 32, 64)
    expected = node(model(x), "ScaledDotProductFlashAttentionForCpuBackward0")._saved_logsumexp
    session = lowtide.attach(model, min_size=0, rules=[Rule(codec="sz", bound="1 std")])
    saved = node(model(x), "ScaledDotProductFlashAttentionForCpuBackward0")
    assert torch.equal(saved._saved_logsumexp, expected)
    codecs = {entry.name.split(".")[-1]: entry.codec for entry in session.report().sites}
    assert codecs["logsumexp"] == "kept"
    assert codecs["query"] == codecs["key"] == codecs["value"] == codecs["output"] == "sz"
