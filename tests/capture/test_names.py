"""What a site is called: the path of the module that ran, the op, the field, and a number where that repeats."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import make_dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.capture import needs
from lowtide.records import Site


@pytest.fixture
def names():
    """The names of the sites at which a model saves, with everything large enough to be named."""

    def run(model: nn.Module, *inputs: torch.Tensor) -> list[str]:
        session = lowtide.attach(model, "exact", min_size=0)
        output = model(*inputs)
        session.detach()
        del output
        return sorted(entry.name for entry in session.report().sites)

    return run


def test_modules_are_named_by_their_path(names):
    block = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GELU())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ModuleDict({"inner": block})["inner"], nn.Flatten(), nn.Softmax(-1))
    expected = ["1.0:convolution.input", "1.1:gelu.self", "3:softmax.result"]
    assert names(model, torch.randn(2, 3, 8, 8)) == expected


def test_functional_calls_are_named_by_the_module_that_makes_them(build, names):
    inner = build(lambda self, x: F.gelu(self.linear(x)), linear=nn.Linear(64, 64))
    model = build(lambda self, x: self.block(x).tanh(), block=inner)
    assert names(model, torch.randn(8, 64)) == ["(model):tanh.result", "block:gelu.self"]


def test_the_root_is_called_model(names):
    assert names(nn.Sigmoid(), torch.randn(8, 64, requires_grad=True)) == ["(model):sigmoid.result"]


def test_residual_adds_save_nothing_and_do_not_confuse(build, names):
    model = build(lambda self, x: self.c((h := self.a(x)) + self.b(h.relu()) + h), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.c = nn.Linear(8, 8)
    assert names(model, torch.randn(8, 8)) == ["(model):relu.result", "b:addmm.mat1", "c:addmm.mat1"]


def test_repeats_are_numbered(build, names):
    model = build(lambda self, x: self.linear(x).tanh().exp().tanh().tanh(), linear=nn.Linear(8, 8))
    tanhs = ["(model):tanh.result", "(model):tanh.result#1", "(model):tanh.result#2"]
    assert names(model, torch.randn(8, 8)) == ["(model):exp.result", *tanhs]


def test_a_shared_module_has_one_path_and_several_calls(build, names):
    shared = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = build(lambda self, x: self.second(self.first(x)), first=shared, second=shared)
    expected = ["first.0:addmm.mat1", "first.1:tanh.result", "first.1:tanh.result#1"]
    assert names(model, torch.randn(8, 8)) == expected


def test_numbers_start_again_with_every_forward(build, names):
    model, x = build(lambda self, x: self.linear(x).tanh(), linear=nn.Linear(8, 8)), torch.randn(8, 8)
    session = lowtide.attach(model, "exact", min_size=0)
    outputs = [model(x) for _ in range(3)]
    (entry,) = session.report().sites
    assert (entry.name, entry.saves, len(outputs)) == ("(model):tanh.result", 3, 3)


def test_numbers_start_anew_with_every_forward_in_a_block(build):
    model, x = build(lambda self, x: self.linear(x).tanh(), linear=nn.Linear(8, 8)), torch.randn(8, 8)
    with lowtide.compress(model, "exact", min_size=0) as session:
        outputs = [model(x) for _ in range(2)]
    assert [(entry.name, entry.saves) for entry in session.report().sites] == [("(model):tanh.result", 2)]
    del outputs


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        x, factor = ctx.saved_tensors
        return gradient * factor, gradient * x


def test_custom_functions_are_named_with_an_index(build, names):
    model = build(lambda self, x: _Scaled.apply(self.a(x), self.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    expected = ["(model):custom._scaled.tensors[0]", "(model):custom._scaled.tensors[1]"]
    assert names(model, torch.randn(8, 8)) == expected


def test_a_submodule_called_alone_keeps_its_path(build):
    model = build(lambda self, x: self.head(self.body(x)), body=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model.head = nn.Linear(8, 8)
    session = lowtide.attach(model, "exact", min_size=0)
    output = model.body(torch.randn(8, 8))
    assert [entry.name for entry in session.report().sites] == ["body.1:tanh.result"]
    del output


def test_without_a_model_sites_are_named_by_their_op():
    x = torch.randn(64, 64, requires_grad=True)
    with lowtide.compress(None, "exact") as session:
        loss = x.tanh().exp().mean()
    assert "(model):tanh.result" in {entry.name for entry in session.report().sites}
    del loss


def test_the_last_op_of_a_block_without_a_model_is_known():
    """No later save leads to it: what it returns does."""
    x = torch.randn(64, 64, requires_grad=True)
    with lowtide.compress(None, "exact") as session:
        loss = x.tanh().exp()
    assert [entry.name for entry in session.report().sites] == ["(model):tanh.result", "(model):exp.result"]
    del loss


def test_an_op_that_shows_its_output_to_nobody_is_not_known():
    """The last op of a block is one of a custom function, which function modes do not see: it is counted and kept."""
    x = torch.randn(64, 64, requires_grad=True)
    with lowtide.compress(None, "exact") as session:
        loss = _Scaled.apply(x.tanh(), x)
    entries = [entry for entry in session.report().sites if "unknown" in entry.name]
    assert [entry.codec for entry in entries] == ["kept", "kept"]
    assert all(entry.reason.startswith("its op was not found in the graph") for entry in entries)
    del loss


def test_a_loss_outside_the_model_counts_inside_a_block(build):
    model, x = build(lambda self, x: self.linear(x), linear=nn.Linear(64, 64)), torch.randn(64, 64)
    with lowtide.compress(model, "exact") as session:
        loss = F.cross_entropy(model(x), torch.arange(64)).exp()
        loss.backward()
    assert "(model):log_softmax.result" in {entry.name for entry in session.report().sites}


@pytest.mark.parametrize("kind", [tuple, list, dict, "namedtuple", "dataclass", "slots"])
def test_outputs_in_a_nest_are_found(build, kind):
    """The last op of a forward is only known from the output."""
    wrap = {
        tuple: lambda y: (1, (y,)),
        list: lambda y: [[y]],
        dict: lambda y: {"logits": {"deep": y}},
        "namedtuple": namedtuple("Output", "logits"),
        "dataclass": make_dataclass("Output", ["logits"]),
        "slots": make_dataclass("Output", ["logits"], slots=True),
    }[kind]
    model = build(lambda self, x: wrap(self.linear(x).tanh()), linear=nn.Linear(8, 8))
    session = lowtide.attach(model, "exact", min_size=0)
    output = model(torch.randn(8, 8))
    assert [entry.name for entry in session.report().sites] == ["(model):tanh.result"]
    del output


@pytest.mark.parametrize(
    ("node", "op"),
    [
        ("ConvolutionBackward0", "convolution"),
        ("NativeBatchNormBackward0", "native_batch_norm"),
        ("MaxPool2DWithIndicesBackward0", "max_pool2d_with_indices"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "scaled_dot_product_flash_attention_for_cpu"),
        ("NllLoss2DBackward0", "nll_loss2d"),
        ("SqueezeBackward1", "squeeze"),
        ("MyOpBackward", "custom.my_op"),
        ("torch::autograd::CopySlices", "copy_slices"),
    ],
)
def test_node_names_become_op_names(node, op):
    assert needs.snake(needs.op_of(node)) == op


def test_a_site_writes_its_name():
    assert Site("layer.1", "relu", "result").name == "layer.1:relu.result"
    assert Site("", "relu", "result", call=2).name == "(model):relu.result#2"


def test_names_repeat_from_forward_to_forward_in_a_block():
    """A training loop inside one block has the sites of one forward, however long it runs."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    counts = []
    with lowtide.compress(model, min_size=0) as session:
        for _ in range(3):
            torch.nn.functional.mse_loss(model(torch.randn(64, 64)), torch.zeros(64, 64)).backward()
            counts.append(len(session.report().sites))
    assert counts[0] == counts[1] == counts[2] > 0
