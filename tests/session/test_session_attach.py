"""attach and detach: what is accepted, what is refused and how, and that nothing stays behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import AttachError, UnknownNameError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fixd"}, r"unknown method 'fixd'; known: .*exact, fixed.* Did you mean 'fixed'\?"),
        ({"method": None}, "unknown method None; known: .*exact"),
        ({"bound": 1}, "unknown option of method 'budget' 'bound'; known: checks, coder, factor"),
        ({"linear": "1 std"}, "unknown option of method 'budget' 'linear'; .* Methods that have it: cusz, fixed"),
        ({"method": "fixed", "bound": 1}, "unknown option of method 'fixed' 'bound'; known: attention, coder, linear"),
        ({"method": "fixed", "pointwize": 1}, "option of method 'fixed' 'pointwize'; .*Did you mean 'pointwise'"),
        ({"method": "exact", "linear": 1}, r"unknown option of method 'exact' 'linear'; known: \(none\)"),
        ({"rounding": "up"}, "unknown rounding 'up'; known: dither, nearest"),
        ({"coder": "zip"}, "unknown coder 'zip'"),
        ({"method": "fixed", "linear": "0.4 sd"}, "unknown unit of a bound 'sd'; .*Did you mean 'std'"),
        ({"store": "disc"}, "unknown store 'disc'; known: device"),
        ({"check": "ful"}, "unknown value of check 'ful'; known: False, True, full. Did you mean 'full'"),
        ({"check": None}, "unknown value of check 'None'"),
        ({"check": 2}, "unknown value of check '2'"),
    ],
)
def test_unknown_names_are_refused_by_name(mlp, options, message):
    model = mlp()
    with pytest.raises(UnknownNameError, match=message):
        lowtide.attach(model, **options)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear": 0}, "bound must be finite and greater than zero, got 0.0"),
        ({"linear": "-1 std"}, "bound must be finite and greater than zero"),
        ({"linear": "nan"}, "bound must be finite and greater than zero"),
        ({"linear": "much"}, "cannot read 'much' as a bound"),
    ],
)
def test_bounds_that_cannot_be_promised_are_refused(mlp, options, message):
    with pytest.raises(lowtide.LowtideError, match=message):
        lowtide.attach(mlp(), "fixed", **options)


@pytest.mark.parametrize("thing", [None, "model", torch.nn.functional.relu, nn.Linear, [nn.Linear(2, 2)]])
def test_what_is_no_module_is_refused(thing):
    with pytest.raises(AttachError, match=r"attach wants an nn.Module, got (NoneType|str|function|type|list)"):
        lowtide.attach(thing)


def test_attaching_twice_is_refused(mlp):
    model = mlp()
    session = lowtide.attach(model)
    with pytest.raises(AttachError, match=r"module \(model\) is attached already; call detach\(\)"):
        lowtide.attach(model)
    session.detach()
    lowtide.attach(model)


def test_attaching_to_a_part_of_an_attached_model_is_refused(mlp):
    model = nn.Sequential(mlp())
    lowtide.attach(model)
    with pytest.raises(AttachError, match=r"module \(model\) is attached already"):
        lowtide.attach(model[0])


def test_attaching_to_a_model_with_an_attached_part_is_refused(mlp):
    model = nn.Sequential(mlp())
    lowtide.attach(model[0][2])
    with pytest.raises(AttachError, match=r"module 0.2 is attached already"):
        lowtide.attach(model)
    with pytest.raises(AttachError, match=r"module 0.2 is attached already"), lowtide.compress(model):
        pass
    assert not model._forward_hooks


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("depth", [0, 1], ids=["root", "part"])
def test_scripted_modules_are_refused(mlp, depth):
    """They do not run Python hooks: nothing inside would be named, and a part of one cannot be hooked."""
    scripted = torch.jit.script(nn.Tanh())
    model = nn.Sequential(nn.Linear(4, 4), scripted) if depth else scripted
    with pytest.raises(AttachError, match="TorchScript modules do not run Python hooks"):
        lowtide.attach(model)
    assert not any(getattr(module, "_forward_pre_hooks", None) for module in model.modules())


@pytest.mark.parametrize("depth", [0, 1], ids=["root", "part"])
def test_data_parallel_is_refused(depth):
    replicated = nn.DataParallel(nn.Linear(4, 4))
    with pytest.raises(AttachError, match="DataParallel runs its replicas in threads"):
        lowtide.attach(nn.Sequential(replicated) if depth else replicated)


def test_the_model_is_untouched(mlp, x):
    model, plain = mlp(), mlp()
    parameters = dict(model.named_parameters())
    output = plain(x)
    lowtide.attach(model, min_size=0)
    assert torch.equal(model(x), output)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert type(model) is nn.Sequential


def test_detach_leaves_no_hooks(mlp, x):
    """Surprise 38: CUDA graphs refuse modules that have any."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    session = lowtide.attach(model, optimizer=optimizer)
    model(x).sum().backward()
    session.detach()
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    for module in model.modules():
        assert not any(getattr(module, kind) for kind in (*kinds, "_forward_hooks_always_called", "_backward_hooks"))
    assert not optimizer._optimizer_step_post_hooks
    session.detach()  # once more does no harm


def test_detach_between_forward_and_backward_keeps_the_graph_whole(mlp, x, gradients, assert_same):
    model = mlp()
    expected = gradients(model, x)
    session = lowtide.attach(model, "exact")
    loss = model(x).square().sum()
    held = session.ledger.held
    session.detach()
    assert session.ledger.held == held > 0
    model.zero_grad()
    loss.backward()
    assert_same(expected, [parameter.grad for parameter in model.parameters()])
    assert session.ledger.held == session.ledger.raw == 0


def test_detach_during_forward_takes_the_hooks_off(mlp, x):
    model = mlp()
    session = lowtide.attach(model)
    model[3].register_forward_hook(lambda module, inputs, output: session.detach())
    model(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("detach", [True, False])
def test_neither_model_nor_session_outlives_its_last_reference(mlp, x, detach):
    model = mlp()
    session = lowtide.attach(model)
    model(x).sum().backward()
    if detach:
        session.detach()
    watched = weakref.ref(model), weakref.ref(session)
    del model, session
    gc.collect()
    assert [watch() for watch in watched] == [None, None]


def test_hooks_of_the_user_stay_and_run(mlp, x):
    model, seen = mlp(), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    model.register_forward_hook(lambda module, inputs, output: seen.append("after"))
    session = lowtide.attach(model)
    model(x)
    session.detach()
    model(x)
    assert seen == ["before", "after"] * 2


def test_no_gradient_no_scope(mlp, x):
    model = mlp().eval()
    session = lowtide.attach(model, min_size=0)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.requires_grad_(False)(x)
    assert session.report().sites == ()
    model.requires_grad_(True)(x).sum().backward()  # evaluation with gradients is training, as far as memory goes
    assert session.ledger.raw_peak > 0
