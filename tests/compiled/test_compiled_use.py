"""Ways of use: what a compiled model does as an eager one does, and what is said where it cannot."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import AttachError, CompileError, GraphError, LowtideWarning, PayloadError, UnknownNameError
from lowtide.session import Session


def test_results_state_and_buffers_are_those_of_the_model(net, attach, images, assert_same):
    plain, model = net(), net()
    attach(model)
    for _ in range(3):
        expected, got = plain(images), model(images)
        got.sum().backward()
    assert_same([expected], [got])
    assert list(plain.state_dict()) == list(model.state_dict())
    assert_same(list(plain.buffers()), list(model.buffers()))


def test_without_gradients_nothing_is_held(net, attach, images, assert_same):
    plain, model = net().eval(), net().eval()
    session = attach(model)
    with torch.no_grad():
        assert_same([plain(images)], [model(images)])
    assert session.ledger.raw_peak == session.ledger.held_peak == 0


def test_inputs_that_want_a_gradient(net, attach, images, gradients, assert_same):
    eager, compiled = net(), net()
    attach(eager, backend=None), attach(compiled)
    expected = gradients(eager, images.clone().requires_grad_())
    assert len(expected) == 1 + len(list(eager.parameters()))
    assert_same(expected, gradients(compiled, images.clone().requires_grad_()))


def test_casts_of_parameters_are_made_again(net, attach, images, assert_same):
    """Autocast's copies of weights are in what is held only if they are asked for."""
    results = []
    for recast in (True, False):
        model = net()
        session = attach(model, recast=recast)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(images)
        held = session.ledger.held
        output.float().sum().backward()
        results.append(([parameter.grad for parameter in model.parameters()], held))
    (again, held), (handed, held_with_casts) = results
    assert_same(again, handed)
    weights = sum(part.numel() for part in model.parameters() if part.dim() > 1)
    assert held_with_casts - held == 2 * weights


def test_frozen_layers(net, attach, images, gradients, assert_same):
    results = []
    for backend in (None, "aot_eager"):
        model = net()
        for part in (model.first, model.wide):
            part.requires_grad_(False)
        session = attach(model, backend=backend)
        results.append((gradients(model, images), session.ledger.held_peak))
    (eager, held), (compiled, held_by_graph) = results
    assert_same(eager, compiled)
    assert held_by_graph <= 1.01 * held


@pytest.mark.parametrize("dynamic", [None, True], ids=["by itself", "from the start"])
def test_batches_of_any_size(net, images, labels, assert_same, dynamic):
    """The second size is compiled with sizes that are known only when the graph runs; then there are no more graphs."""
    results = []
    for is_compiled in (False, True):
        model = net()
        session = lowtide.attach(model, "fixed", min_size=1024)
        if is_compiled:
            session.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for size in (8, 6, 4, 7, 3):
            model.zero_grad()
            F.cross_entropy(model(images[:size]), labels[:size]).backward()
        results.append([parameter.grad for parameter in model.parameters()])
        report = str(session.report())
        session.detach()
    assert_same(*results)
    assert re.search("; [12] graphs", report), report


def test_the_loss_is_recorded_too(net, attach, images, labels, assert_same):
    results = []
    for backend in (None, "aot_eager"):
        model = net()
        session = attach(model, backend=backend)
        with session.recording():
            loss = F.cross_entropy(model(images).repeat(20, 20), labels.repeat(20))
        names = set(session.ledger.sites)
        held = session.ledger.held
        loss.backward()
        results.append(([parameter.grad for parameter in model.parameters()], held))
        assert "(model):log_softmax.result" in names
        assert session.ledger.held == 0
    (eager, held), (compiled, held_by_graph) = results
    assert_same(eager, compiled)
    assert held_by_graph == pytest.approx(held, rel=0.01)


def test_a_checkpoint_in_the_model_stays_one(net, attach, images, gradients, assert_same):
    results = []
    for backend in (None, "aot_eager"):
        model = net()
        model.end = lambda x, end=model.end: checkpoint(end, x, use_reentrant=False)
        session = attach(model, backend=backend)
        results.append(gradients(model, images))
        assert not any(site.startswith(("wide:", "head:")) for site in session.ledger.sites)
    assert_same(*results)


def test_a_model_in_pieces_is_held_piece_by_piece(net, attach, images, gradients, assert_same):
    results, held = [], []
    for backend in (None, "aot_eager"):
        model = net()

        def forward(x, model=model):
            x = model.begin(x)
            torch._dynamo.graph_break()
            return model.end(x)

        model.forward = forward
        session = attach(model, backend=backend, fullgraph=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(gradients(model, images))
        said = [str(item.message) for item in caught if item.category is LowtideWarning]
        held.append(session.ledger.held_peak)
        assert bool(said) == (backend is not None) and all("into 2 graphs" in text for text in said)
    assert_same(*results)
    assert held[1] <= 1.05 * held[0]


def test_what_torch_compile_leaves_out_runs_eagerly(attach, gradients, assert_same):
    """Recurrent layers are not compiled; Lowtide says so and holds what they save as in any eager model."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(16, 64, batch_first=True)

        @torch.compiler.disable
        def forward(self, x):
            return F.gelu(self.cell(x)[0]).square()

    torch.manual_seed(0)
    model = Reader()
    x = torch.randn(8, 16, 16)
    session = attach(model, fullgraph=False)
    with pytest.warns(LowtideWarning, match="ran nothing of this forward as a graph"):
        expected = gradients(model, x)
    assert session.ledger.held_peak == 0
    got = gradients(model, x)
    assert session.ledger.held_peak > 0
    for one, other in zip(expected, got, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0.2 * float(one.abs().max()))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of inputs that an earlier graph has made
def test_blocks_that_share_a_graph_have_names_of_their_own(attach, gradients, assert_same):
    """Where the model's own forward is not compiled, blocks are: one graph serves all that are alike."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x):
            return x + F.gelu(self.inner(self.norm(x)))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        @torch.compiler.disable(recursive=False)
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    results = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = Stack()
        session = attach(model, backend=backend, fullgraph=False, remake=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowtideWarning)
            found = gradients(model, torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))
        coded = {name for name, site in session.ledger.sites.items() if site.need == "values"}
        results.append((found, coded, str(session.report())))
    (eager, names, _), (compiled, names_in_graph, report) = results
    assert "1 graphs" in report or "2 graphs" in report
    # The input of the first block is the model's own, which an eager session leaves to the caller.
    assert names_in_graph - {"blocks.0.norm:native_layer_norm.input"} == names
    assert {name.split(".")[1][0] for name in names} == {"0", "1", "2"}
    assert_same(eager, compiled)


@pytest.mark.filterwarnings("ignore:Profiler function")  # torch's own, of the wrapper's forward
def test_data_parallel_in_several_processes(net, attach, images, gradients, assert_same, one_process):
    """The compiler begins its graph inside of the wrapper; names are those of the whole all the same."""
    results = []
    for backend in (None, "aot_eager"):
        model = nn.parallel.DistributedDataParallel(net())
        session = attach(model, backend=backend, fullgraph=False)
        results.append((gradients(model, images), {name for name in session.ledger.sites if ":relu." in name}))
    (eager, names), (compiled, names_in_graph) = results
    assert_same(eager, compiled)
    assert names == names_in_graph == {"module:relu.result", "module:relu.result#1"}


def test_a_step_that_somebody_watches_runs_eagerly(net, attach, images, gradients):
    """A mode that counts ops, say, sees them; the steps after it are compiled."""
    from torch.utils.flop_counter import FlopCounterMode

    model = net()
    session = attach(model)
    with FlopCounterMode(display=False) as counter:
        gradients(model, images)
    assert counter.get_total_flops() > 0
    assert session.ledger.raw_peak > 4 * session.ledger.held_peak > 0
    gradients(model, images)
    assert "1 calls, 1 eager ones" in str(session.report())


def test_copies_and_pickles_are_plain_models(net, attach, images, gradients, assert_same):
    model = net()
    expected = gradients(net(), images)
    attach(model)
    gradients(model, images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for name, buffer in net().named_buffers():
            other.get_buffer(name).copy_(buffer)
        assert_same(expected, gradients(other, images))


def test_detach_leaves_a_plain_model(net, attach, images, gradients, assert_same):
    model = net()
    session = attach(model)
    gradients(model, images)
    session.detach()
    assert model._compiled_call_impl is None
    model.load_state_dict(net().state_dict())
    held = session.ledger.held_peak
    assert_same(gradients(net(), images), gradients(model, images))
    assert session.ledger.held_peak == held


def test_parts_that_are_called_by_themselves_are_held(net, attach, images):
    model = net()
    session = attach(model)
    model(images).sum().backward()
    before = session.ledger.raw_peak
    assert before > 0 and session.ledger.raw == 0
    output = model.end(model.begin(images))
    assert session.ledger.raw > 0
    output.sum().backward()


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(net, images, labels, assert_same):
    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    def begin():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        session = lowtide.attach(model, optimizer=optimizer, min_size=1024)
        session.compile(backend="aot_eager", fullgraph=True)
        return model, optimizer, session

    model, optimizer, session = begin()
    train(model, optimizer, 3)
    weights, state = copy.deepcopy(model.state_dict()), session.state_dict()
    train(model, optimizer, 4)
    other, other_optimizer, resumed = begin()
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(other, other_optimizer, 4)
    assert_same([*model.parameters()], [*other.parameters()])
    session.detach(), resumed.detach()


def test_a_tensor_that_is_changed_after_it_was_saved(net, attach, images):
    model = net()

    def forward(x):
        made = model.first(x).exp()
        made.add_(1)
        return made

    model.forward = forward
    attach(model)
    with pytest.raises(Exception, match=r"modified by an inplace operation: tensor of shape \(8, 16, 16, 16\)"):
        model(images).sum().backward()


def test_hooks_of_others_around_a_compiled_model(net, attach, images, gradients, assert_same):
    model = net()
    session = attach(model)
    expected = gradients(model, images)
    model.load_state_dict(net().state_dict())
    session._pipeline.resume(0, 0)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert_same(expected[:2], gradients(model, images)[:2])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = model(images).sum()
    with pytest.raises(PayloadError, match="token was copied between forward and backward"):
        loss.backward()


def test_a_rule_that_matches_nothing_is_named(net, attach, images):
    model = net()
    attach(model, rules=[{"path": "wyde", "keep": True}])
    with pytest.warns(LowtideWarning, match=r"rule\(path='wyde'\) matched none of the tensors"):
        model(images).sum().backward()


def test_a_model_of_which_nothing_can_be_held(attach, images):
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 4))
    attach(model)
    with pytest.warns(LowtideWarning, match="nothing that this forward saves"):
        model(images).sum().backward()


def test_tensors_of_other_kinds_are_left_to_the_compiler(attach, gradients, one_process, assert_same):
    """Weights of a tensor-parallel layer, and what it saves, are no plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    results = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
        parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
        session = attach(model, backend=backend, fullgraph=False)
        found = gradients(model, torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))
        results.append([part.full_tensor() if hasattr(part, "full_tensor") else part for part in found])
        assert session.ledger.held == 0
    assert_same(*results)


def test_the_report_counts_calls(net, attach, images):
    model = net()
    session = attach(model)
    for _ in range(2):
        model(images).sum().backward()
    assert "compiled by aot_eager: 2 calls, 0 eager ones; 1 graphs" in str(session.report())


def test_in_one_line(net, images):
    model = net()
    session = lowtide.attach(model, "fixed", min_size=1024, compile={"backend": "aot_eager", "fullgraph": True})
    model(images).sum().backward()
    assert "compiled by aot_eager: 1 calls" in str(session.report())
    session.detach()
    with pytest.raises(UnknownNameError, match="unknown backend"):
        lowtide.attach(model, "fixed", compile={"backend": "fast"})
    lowtide.attach(model, "fixed").detach()  # nothing was left attached


def test_what_is_refused(net, attach):
    with pytest.raises(CompileError, match="needs a model"):
        Session(None, "fixed").compile()
    session = attach(net(), backend=None)
    with pytest.raises(UnknownNameError, match="unknown backend 'eager'; known: aot_eager, inductor"):
        session.compile(backend="eager")
    for options in ({"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}):
        with pytest.raises(CompileError, match="replays CUDA graphs"):
            session.compile(**options)
    with pytest.raises(UnknownNameError, match="unknown mode 'fast'; known: default, "):
        session.compile(mode="fast")
    session.compile(backend="aot_eager")
    with pytest.raises(CompileError, match="compiled already"):
        session.compile()
    with pytest.raises(GraphError, match="need a model on an NVIDIA GPU"):
        session.graph(lambda x: x)
    graphed = attach(net(), backend=None)
    step = nn.Identity()  # stands for one, which needs a GPU
    graphed._graphs.add(step)
    with pytest.raises(CompileError, match=r"compile\(\) before graph\(\)"):
        graphed.compile()
    with pytest.raises(CompileError, match=r"use torch\.utils\.checkpoint"):
        attach(nn.Sequential(net()), "fixed", backend=None, recompute="0").compile()


def test_compiling_by_hand_is_told_the_way(net, attach, images):
    model = net()
    attach(model, backend=None)
    with pytest.raises(Exception, match=r"call its compile\(\)"):
        torch.compile(model, backend="eager", fullgraph=True)(images)
    with pytest.raises(AttachError, match=r"call compile\(\) of the session"):
        lowtide.attach(torch.compile(net(), backend="eager"))
