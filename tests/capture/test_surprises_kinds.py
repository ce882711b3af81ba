"""Surprise 28: tensors that are not plain, dense and floating reach the hooks too, and pass through unharmed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide

SUBCLASS = "tensor subclass"
NO_CODEC = "dtype is not stored by any codec"


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def _sparse(layout: torch.layout) -> torch.Tensor:
    dense = torch.eye(64)
    return dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_sparse_tensors_inside_the_model(build, gradients, assert_same, layout):
    adjacency = _sparse(layout)
    model = build(lambda self, x: (adjacency @ self.linear(x)).relu(), linear=nn.Linear(64, 64))
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
    assert NO_CODEC in session.report().to_dict()["left_alone"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_sparse_tensors_as_inputs_of_the_model(build, gradients, assert_same, layout):
    model = build(lambda self, adjacency, x: (adjacency @ self.linear(x)).relu(), linear=nn.Linear(64, 64))
    adjacency, x = _sparse(layout), torch.randn(64, 64)
    plain = gradients(model, adjacency, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, adjacency, x))


def test_jagged_nested_tensors(build):
    rows = [torch.randn(length, 64) for length in (5, 7)]

    def forward(self, *rows):
        nested = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
        return torch.nested.to_padded_tensor(self.linear(nested).relu(), 0.0)

    model = build(forward, linear=nn.Linear(64, 64))
    plain = torch.autograd.grad(model(*rows).sum(), list(model.parameters()))
    session = lowtide.attach(model, "exact", min_size=0)
    coded = torch.autograd.grad(model(*rows).sum(), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, coded, strict=True))
    assert session.report().to_dict()["left_alone"][SUBCLASS]["saves"] > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_strided_nested_tensors(build):
    """The older kind is no subclass, says that it is strided, and has no shape."""
    rows = [torch.randn(length, 64) for length in (5, 7)]

    def forward(self, *rows):
        return torch.cat(self.linear(torch.nested.as_nested_tensor(list(rows))).unbind())

    model = build(forward, linear=nn.Linear(64, 64))
    plain = torch.autograd.grad(model(*rows).sum(), list(model.parameters()))
    lowtide.attach(model, "exact", min_size=0)
    coded = torch.autograd.grad(model(*rows).sum(), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, coded, strict=True))


def test_fake_tensors():
    with FakeTensorMode(), pytest.warns(lowtide.LowtideWarning, match=rf"compressed none of them \({SUBCLASS}\)"):
        model = _mlp()
        session = lowtide.attach(model, min_size=0)
        model(torch.randn(64, 64)).sum().backward()
    assert model[0].weight.grad.shape == (64, 64)
    assert session.report().to_dict()["left_alone"][SUBCLASS]["saves"] == 3


def test_meta_tensors():
    """A model on the meta device runs for its shapes alone; there is nothing to code, and no bytes to count."""
    model = _mlp().to("meta")
    session = lowtide.attach(model, "exact", min_size=0)
    model(torch.randn(64, 64, device="meta")).sum().backward()
    assert model[0].weight.grad.shape == (64, 64)
    assert session.ledger.held == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors(build, gradients, assert_same, dtype):
    model = build(lambda self, x: (torch.fft.fft(self.linear(x)).to(dtype) ** 2).abs(), linear=nn.Linear(64, 64))
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
    assert NO_CODEC in session.report().to_dict()["left_alone"]


def test_mkldnn_tensors(build, gradients, assert_same):
    model = build(lambda self, x: self.linear(x).to_mkldnn().relu().to_dense(), linear=nn.Linear(64, 64))
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))


class _Tagged(torch.Tensor):
    """A subclass that does nothing."""


def test_other_subclasses(build, gradients, assert_same):
    model = build(lambda self, x: F.gelu(self.linear(x).as_subclass(_Tagged)).as_subclass(torch.Tensor))
    model.linear = nn.Linear(64, 64)
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
    assert session.report().to_dict()["left_alone"][SUBCLASS]["saves"] == 1


def test_empty_batches(gradients, assert_same):
    layers = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 8)
    model, x = nn.Sequential(*layers, nn.Dropout(), nn.GELU()), torch.randn(0, 3, 8, 8)
    plain = gradients(model, x)
    for method in ("exact", "fixed"):
        session = lowtide.attach(model, method, min_size=0, check="full")
        assert_same(plain, gradients(model, x))
        session.detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floating_dtypes(dtype, gradients, assert_same):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).to(dtype)
    x = torch.randn(64, 64, dtype=dtype)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0, check="full")
    assert_same(plain, gradients(model, x))
    session.detach()
    session = lowtide.attach(model, min_size=0, check="full")
    assert {gradient.dtype for gradient in gradients(model, x)} == {dtype}


def test_tensor_parallel_models_pass_through(one_process, gradients):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    model, x = _mlp(), torch.randn(64, 64)
    plain = gradients(model, x)
    mesh = init_device_mesh("cpu", (1,))
    distribute_module(model, mesh)
    session = lowtide.attach(model, "exact", min_size=0)
    output = model(distribute_tensor(x, mesh, [Shard(0)]))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    output.backward(distribute_tensor(weights, mesh, [Shard(0)]))
    coded = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(plain, coded, strict=True))
    assert {entry.reason for entry in session.report().sites} == {SUBCLASS}


def test_sharded_weights_stay_aliases(one_process, gradients, node):
    """Surprise 27: FSDP2 frees a weight by emptying its storage; a copy of it would pin the unsharded weight."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = _mlp(), torch.randn(64, 64)
    plain = gradients(model, x)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    session = lowtide.attach(model, "exact", min_size=0)
    coded = [gradient.full_tensor() for gradient in gradients(model, x)]
    assert all(torch.equal(one, other) for one, other in zip(plain, coded, strict=True))
    assert {entry.name for entry in session.report().sites} == {"1:relu.result", "2:addmm.mat1"}
    assert session.ledger.raw_peak == 64 * 64 * 4


def test_distributed_data_parallel(one_process, gradients, assert_same):
    model, x = _mlp(), torch.randn(64, 64)
    plain = gradients(model, x)
    wrapped = nn.parallel.DistributedDataParallel(model)
    session = lowtide.attach(wrapped, "exact", min_size=0)
    assert_same(plain, gradients(wrapped, x))
    assert {entry.name for entry in session.report().sites} == {"module.1:relu.result", "module.2:addmm.mat1"}


def test_attention_with_a_boolean_mask(build, gradients, assert_same):
    """The mask arrives as a float bias that is expanded over batch and heads."""

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mask = torch.ones(32, 32, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model, x = build(forward, qkv=nn.Linear(64, 192)), torch.randn(2, 32, 64)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
