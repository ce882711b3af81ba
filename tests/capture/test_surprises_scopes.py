"""Where our hooks are not: under other hooks, checkpoints, transforms, threads, and graphs made in backward."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint as checkpointing

import lowtide
from lowtide.errors import AttachError


@pytest.fixture
def three(build):
    """``three(middle)``: a linear, ``middle(model, hidden)``, a linear; the middle has a block of its own to use."""

    def make(middle):
        block = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        return build(
            lambda self, x: self.last(middle(self, self.first(x))),
            first=nn.Linear(64, 64),
            block=block,
            last=nn.Linear(64, 64),
        )

    return make


def test_hooks_of_the_user_inside_the_model_win(three, gradients, assert_same):
    """Surprise 15: only the innermost pair runs; what it packs is not ours to count, and nothing breaks."""
    packed = []

    def middle(self, hidden):
        with saved_tensors_hooks(lambda tensor: packed.append(tensor.shape) or tensor.detach(), lambda held: held):
            return self.block(hidden)

    model, x = three(middle), torch.randn(64, 64)
    plain = gradients(model, x)
    packed.clear()
    session = lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
    assert len(packed) == 3  # the block's input, its weight, its output
    assert [entry.name for entry in session.report().sites] == ["last:addmm.mat1"]


def test_our_hooks_inside_those_of_the_user_win_and_say_so(gradients, assert_same):
    """Surprise 15: results stay right, and one warning says that save_on_cpu is out of work."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact")
    with save_on_cpu(), pytest.warns(lowtide.LowtideWarning, match="other saved-tensor hooks") as caught:
        assert_same(plain, gradients(model, x))
        gradients(model, x)
    assert len(caught) == 1
    assert session.ledger.raw_peak == 64 * 64 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_the_model_packs_its_input_exactly(three, gradients, assert_same, reentrant):
    """Surprise 15: a checkpoint hides its inside. Its input is kept exact, so that it recomputes the same numbers."""
    model = three(lambda self, hidden: checkpointing.checkpoint(self.block, hidden, use_reentrant=reentrant))
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, rules=[{"path": "last", "keep": True}, {"path": "block*", "bound": "1 std"}])
    with pytest.warns(lowtide.LowtideWarning) as caught:
        assert_same(plain, gradients(model, x))
    assert sorted(str(warning.message)[:20] for warning in caught) == ["rule(path='block*') ", "this forward saved t"]
    # Up to torch 2.11 a checkpoint saves its inputs together with an empty tensor.
    kept = {entry.name.partition("#")[0] for entry in session.report().sites if entry.raw_nbytes}
    boundary = "(model):custom.checkpoint_function.tensors[0]" if reentrant else "(model):unknown.saved"
    assert kept == {boundary, "last:addmm.mat1"}
    assert session.ledger.raw_peak == 2 * 64 * 64 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_inside_a_checkpoint_is_left_to_it(reentrant):
    """Surprise 17: packed in forward and again in the recomputation, a layer would be held that nobody reads."""
    layer, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64, requires_grad=True)
    (plain,) = torch.autograd.grad(layer(x).sum(), x)
    session = lowtide.attach(layer, min_size=0)
    checkpointing.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, plain)
    assert session.report().sites == ()
    assert session.ledger.raw_peak == session.ledger.held_peak == 0


def test_selective_checkpointing_keeps_tensors_outside_autograd(three, gradients, assert_same):
    """Surprise 16: what its policy keeps never reaches a pack hook, so the ledger does not know it."""

    def policy(context, op, *args, **kwargs):
        keep = op is torch.ops.aten.addmm.default
        return checkpointing.CheckpointPolicy[("PREFER_RECOMPUTE", "MUST_SAVE")[keep]]

    contexts = partial(checkpointing.create_selective_checkpoint_contexts, policy)
    model = three(
        lambda self, hidden: checkpointing.checkpoint(self.block, hidden, use_reentrant=False, context_fn=contexts)
    )
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
    seen = {entry.name.partition("#")[0] for entry in session.report().sites}
    assert seen == {"last:addmm.mat1", "(model):unknown.saved"}


class _Stash(torch.autograd.Function):
    """Keeps its input where autograd does not see it."""

    @staticmethod
    def forward(ctx, x):
        ctx.stash = x.detach()
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.stash.cos()


def test_tensors_stored_on_ctx_are_invisible(three, gradients, assert_same):
    """Surprise 18: only ``save_for_backward`` is seen. What is not seen is neither coded nor counted."""
    model, x = three(lambda self, hidden: _Stash.apply(hidden)), torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
    assert [entry.name for entry in session.report().sites] == ["last:addmm.mat1"]
    assert session.ledger.raw_peak == 64 * 64 * 4


def _in_thread(function) -> None:
    failures = []

    def run():
        try:
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("how", ["attach", "compress"])
def test_a_second_thread_is_covered_by_module_hooks(three, gradients, assert_same, how):
    """Surprise 19: hook stacks are per thread. Ours are pushed by the model itself, so any thread has them."""
    model, x = three(lambda self, hidden: self.block(hidden)), torch.randn(64, 64)
    plain = gradients(model, x)
    peaks = []

    def work(session):
        assert_same(plain, gradients(model, x))
        peaks.append(session.ledger.raw_peak)

    if how == "attach":
        session = lowtide.attach(model, "exact")
        _in_thread(lambda: work(session))
    else:
        with lowtide.compress(model, "exact") as session:
            _in_thread(lambda: work(session))
    assert peaks == [2 * 64 * 64 * 4]
    assert session.ledger.held == session.ledger.raw == 0


def test_data_parallel_is_refused():
    """Surprise 19: its replicas run in threads of their own, as copies that carry no hooks."""
    with pytest.raises(AttachError, match=r"DataParallel runs its replicas in threads .* use DistributedDataParallel"):
        lowtide.attach(nn.DataParallel(nn.Linear(4, 4)))


def test_graphs_made_in_backward_are_kept_and_counted(three):
    """Surprise 19: with a block open around backward, a double backward's saves arrive too; they stay as they are."""
    model, x = three(lambda self, hidden: self.block(hidden)), torch.randn(64, 64, requires_grad=True)
    with lowtide.compress(model, "exact") as session:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert session.report().to_dict()["left_alone"]["saved during backward"]["saves"] > 0
        assert session.ledger.held > 0
        gradient.square().sum().backward()
    del gradient
    assert session.ledger.held == session.ledger.raw == 0


def test_transforms_of_torch_func_work_with_one_warning(three):
    """Surprise 20: torch.func forbids saved-tensor hooks; ours step aside and say so once."""
    model, x = three(lambda self, hidden: self.block(hidden)), torch.randn(64, 64)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    plain = torch.func.grad(loss)(weights)
    session = lowtide.attach(model)
    with pytest.warns(lowtide.LowtideWarning, match="torch.func transform or torch.compile is tracing") as caught:
        coded = [torch.func.grad(loss)(weights) for _ in range(2)]
    assert len(caught) == 1
    assert all(torch.equal(plain[name], gradient[name]) for gradient in coded for name in plain)
    model(x).sum().backward()
    assert session.ledger.raw_peak > 0  # and are back afterwards


def test_functional_call_is_compressed(three, gradients):
    model, x = three(lambda self, hidden: self.block(hidden)), torch.randn(64, 64)
    weights = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}
    session = lowtide.attach(model, "exact", min_size=0)
    output = torch.func.functional_call(model, weights, (x,))
    # two values (the block's input, its output), and the weights, which are no Parameters here
    kept = {entry.name: entry.need for entry in session.report().sites}
    assert kept["block.0:addmm.mat1"] == kept["last:addmm.mat1"] == "values"
    assert kept["block.0:addmm.mat2"] == kept["last:addmm.mat2"] == "exact"
    output.sum().backward()
