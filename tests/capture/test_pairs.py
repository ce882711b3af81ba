"""A batch norm's input and what ReLU made of its output share a payload: which do, and what comes of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo
from lowtide.capture import pairs
from lowtide.capture.handles import Handle, Passed
from lowtide.codecs.sz import Sz
from lowtide.coding import fold
from lowtide.errors import BoundViolationError, ModifiedError
from lowtide.records import TensorSpec
from lowtide.session import Session

BOUNDS = {"linear": "0.3 std", "norm": "0.6 std"}


def block(act: nn.Module | None = None, after: nn.Module | None = None) -> nn.Sequential:
    """Two convolutions with a norm and ReLU between them."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), act or nn.ReLU(), after or nn.Conv2d(8, 8, 3), nn.Flatten()
    )
    nn.init.normal_(net[1].weight, 1.0, 0.5)
    nn.init.normal_(net[1].bias, 0.0, 0.5)
    return net


def make_input() -> Tensor:
    return torch.randn(8, 3, 12, 12)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    (model(x * 1.0) - 1).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def run(model: nn.Module, x: Tensor, steps: int = 4, **options: Any) -> tuple[list[Tensor], Session]:
    """After some steps: habits are learnt in the first ones."""
    options = {"method": "fixed", "coder": "blocks", "remake": True, **BOUNDS, **options}
    session = lowtide.attach(model, min_size=0, **options)
    for _ in range(steps):
        found = gradients(model, x)
        session.step()
    session.detach()
    return found, session


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    error = sum(float((a - b).square().sum()) for a, b in zip(got, expected, strict=True))
    return (error / sum(float(b.square().sum()) for b in expected)) ** 0.5


def is_joint(session: Session) -> bool:
    """ReLU's mask is then where the norm's input is, and half of the payload is counted for each tensor."""
    sites = session.ledger.sites
    masks = [entry.codec for name, entry in sites.items() if "relu" in name]
    values = [entry.held_nbytes for name, entry in sites.items() if name.startswith(("1:native_batch_norm.input", "3"))]
    return masks == ["in sz"] and len(values) >= 2 and abs(values[0] - values[1]) <= 1


def payloads(session: Session) -> set[str]:
    return {key[0] for key, memo in session._pipeline.sites._memos.items() if memo.plan is not None}


def saved(x: Tensor) -> Any:
    """Hooks that leave in the graph what Lowtide's own do: handles, and parameters as they are."""

    def pack(tensor: Tensor) -> Handle | Passed:
        if isinstance(tensor, nn.Parameter) or tensor.dim() == 1:
            return Passed(tensor, "")
        return Handle(TensorSpec.of(tensor), "", "", tensor.grad_fn is None)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: x)


def test_which_tensors_are_pairs():
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    norm = nn.BatchNorm2d(8)
    with saved(x):
        for y in (F.relu(norm(x * 1)), F.relu_(norm(x * 1)), norm(x * 1).relu().flatten(1)):
            found = pairs.find(y)
            assert found is not None and found.source.spec == TensorSpec.of(x) and found.bias is norm.bias
            mean, inverse_std, weight, bias = found.norm()
            assert torch.equal(weight, norm.weight) and torch.equal(bias, norm.bias) and not bias.requires_grad
            assert torch.allclose(mean, x.mean((0, 2, 3)), atol=1e-6)
            assert torch.allclose(inverse_std, (x.var((0, 2, 3), correction=0) + norm.eps).rsqrt(), rtol=1e-5)
        for other in (norm(x * 1), F.relu(x * 1), F.relu(norm(x * 1) + 1), F.leaky_relu(norm(x * 1)), x, x.detach()):
            assert pairs.find(other) is None
        assert pairs.find(F.relu(norm(x * 1)) * 1) is None and pairs.find(F.relu(norm(x * 1)).bfloat16()) is None
        assert pairs.find(F.relu(F.dropout(norm(x * 1), 0.5))) is None
        assert pairs.find(F.relu(nn.BatchNorm2d(8).eval()(x * 1))) is None, "its statistics are not the batch's"
        assert pairs.find(F.relu(nn.BatchNorm2d(8, affine=False)(x * 1))) is None
        assert pairs.find(F.relu(nn.GroupNorm(2, 8)(x * 1))) is None
        assert pairs.find(F.relu(nn.BatchNorm2d(8).bfloat16()(x.bfloat16()))) is None, "its statistics are rounded"
        frozen = nn.BatchNorm2d(8)
        frozen.bias.requires_grad_(False)
        assert pairs.find(F.relu(frozen(x * 1))) is None, "no bias, or one that nobody knows"
    assert pairs.find(F.relu(norm(x * 1))) is None, "no hook has seen its input"


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("steps", [1, 4])  # ops are found in the graph, or known from earlier steps
def test_both_tensors_are_one_payload(steps, inplace):
    model, x = block(nn.ReLU(inplace=inplace)), make_input()
    plain = gradients(model, x)
    usual, before = run(model, x, steps, remake=False)
    joint, session = run(model, x, steps, remake=True)
    assert is_joint(session) and not is_joint(before)
    assert payloads(before) == {"1:native_batch_norm.input", "3:convolution.input"}
    assert payloads(session) == {"1:native_batch_norm.input+relu"}
    assert 0 < distance(joint, plain) < 1.1 * distance(usual, plain) < 0.3
    assert session.ledger.held_peak < 0.75 * before.ledger.held_peak
    assert session.ledger.raw_peak == before.ledger.raw_peak
    raw = [{name: entry.raw_nbytes for name, entry in item.ledger.sites.items()} for item in (before, session)]
    assert raw[0] == raw[1], "what plain training holds is counted at the same sites"
    assert session.ledger.held == 0


def test_both_keep_the_bounds_that_they_have_alone():
    model, x = block(), make_input()
    inputs: dict[str, Tensor] = {}
    for name in ("1", "2", "3"):
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0].detach().clone()}))
    seen: dict[str, Tensor] = {}
    restore = Handle.restore
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handle, "restore", lambda self: seen.setdefault(self.name, restore(self)))
        _, session = run(model, x, 1, linear=0.1)
    assert is_joint(session)
    y, made = inputs["3"], seen["3:convolution.input"]
    assert 0.09 < float((made - y).abs().max()) <= 0.1 and torch.equal(made == 0, y == 0)
    assert torch.equal(seen["2:relu.result"] > 0, y > 0)
    spread = inputs["1"].std((0, 2, 3), correction=0, keepdim=True)
    errors = (seen["1:native_batch_norm.input"] - inputs["1"]).abs() / spread
    assert 0.58 < float(errors[y == 0].max()) <= 0.6
    steep = model[1].weight.detach().abs().view(1, -1, 1, 1).clamp(min=0.1 / 0.6)
    assert float((errors * steep)[y > 0].max()) <= 0.1 + 1e-5, "where it is on, it is as fine as the other needs it"


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (block, (8, 3, 12, 12)),
        (lambda: nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)), (600, 20)),
        (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3)), (16, 2, 40)),
        (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 4, 3)), (4, 2, 8, 8, 8)),
        (lambda: block(after=nn.Sequential(nn.Flatten(), nn.Linear(8 * 144, 5))), (8, 3, 12, 12)),
        (lambda: block().to(memory_format=torch.channels_last), (8, 3, 12, 12)),
        (lambda: block().double(), (8, 3, 12, 12)),
    ],
    ids=["conv2d", "linear", "conv1d", "conv3d", "flattened", "channels_last", "float64"],
)
def test_layers_and_layouts(model: Callable[[], nn.Module], shape):
    net = model()
    x = torch.randn(shape, dtype=next(net.parameters()).dtype)
    if "channels_last" in str(next(net.parameters()).stride()) or next(net.parameters()).stride()[-1] != 1:
        x = x.to(memory_format=torch.channels_last)
    plain = gradients(net, x)
    usual, _ = run(net, x, remake=False)
    joint, session = run(net, x, check="full")
    assert is_joint(session)
    assert 0 < distance(joint, plain) < 1.2 * distance(usual, plain) < 0.4


def test_autocast():
    model, x = block(), torch.randn(16, 3, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(model, x)
        usual, before = run(model, x, remake=False)
        joint, session = run(model, x, check="full")
    assert is_joint(session)
    assert 0 < distance(joint, plain) < 1.2 * distance(usual, plain) < 0.3
    assert session.ledger.held_peak < 0.75 * before.ledger.held_peak


def test_a_mask_alone():
    """A pool asks for the shape of what ReLU made, and nobody for its values: the mask is in the norm's input."""
    model, x = block(after=nn.MaxPool2d(2)), make_input()
    plain = gradients(model, x)
    joint, session = run(model, x, check="full")
    _, before = run(model, x, remake=False)
    codecs = {name: entry.codec for name, entry in session.ledger.sites.items()}
    assert codecs["2:relu.result"] == "in sz" and codecs["3:max_pool2d_with_indices.self"] == "shape"
    assert session.ledger.sites["2:relu.result"].held_nbytes == 0
    assert before.ledger.sites["2:relu.result"].codec == "bitmask"
    assert 0 < distance(joint, plain) < 0.3 and session.ledger.held_peak < 0.95 * before.ledger.held_peak


class Branches(nn.Module):
    """What ReLU made is read by two layers, and by a third one when it has been settled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.one, self.two, self.three = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.stem(x)))
        z = self.norms[0](self.one(y)) + self.norms[1](self.two(y))
        return z + self.three(y)


@pytest.mark.parametrize("steps", [1, 4])
def test_one_payload_serves_all_who_read(steps):
    model, x = Branches(), make_input()
    plain = gradients(model, x)
    joint, session = run(model, x, steps)
    held = [session.ledger.sites[f"{name}:convolution.input"].held_nbytes for name in ("one", "two", "three")]
    assert held[0] > 0 == held[1] == held[2]
    assert 0 < distance(joint, plain) < 0.3


def test_how_often_it_is_decoded():
    """Once for what ReLU made, once for its mask and the norm's input; once for all where it is small."""
    model, x = block(), make_input()
    decoded = []
    decode = Sz.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sz, "decode", lambda self, encoded: decoded.append(encoded.spec.shape) or decode(self, encoded))
        session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
        for largest in (0, 1 << 30):
            session._pipeline._waiting._largest = largest
            decoded.clear()
            model(x).sum().backward()
            assert len(decoded) == (2 if not largest else 1)
    session.detach()


def test_neither_waits_longer_than_it_must(monkeypatch):
    """Where memory is scarce, both are gone before the layer that reads the second one makes its own output."""
    model, x = block(), make_input()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
    for _ in range(4):  # from then on ops are known from earlier steps
        gradients(model, x)
    events: list[str] = []
    make, folded = F.conv2d, fold.fold

    def convolve(*given: Any) -> Tensor:
        made = make(*given)
        events.append("conv")
        return made

    monkeypatch.setattr(F, "conv2d", convolve)
    monkeypatch.setattr("lowtide.kernels._fold.fold", lambda *given: events.append("fold") or folded(*given))
    session.ledger.is_scarce = True
    gradients(model, x)
    session.detach()
    assert events == ["conv", "fold", "conv"]


def test_backward_twice_and_in_part():
    model, x = block(), make_input()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, [model[3].weight], retain_graph=True)[0]
    with torch.no_grad():
        model[1].weight.mul_(1)  # a scale that has changed is nothing to a layer above the norm, as in plain training
    again = torch.autograd.grad(loss, [model[3].weight], retain_graph=True)[0]
    assert torch.equal(first, again)
    with pytest.raises(ModifiedError, match="modified by an inplace operation"):
        loss.backward()
    loss = model(x).square().sum()
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    session.detach()
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_gradients_of_gradients():
    model, x = block(), make_input().requires_grad_()

    def penalty() -> list[Tensor]:
        gradient = torch.autograd.grad(model(x * 1).square().sum(), x, create_graph=True)[0]
        return list(torch.autograd.grad(gradient.square().sum(), list(model.parameters())[:4]))

    plain = penalty()
    bounds = {"linear": "0.02 std", "norm": "0.02 std"}
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True, **bounds)
    got = penalty()
    session.detach()
    assert 0 < distance(got, plain) < 0.1


def test_nothing_is_left_behind(decoded):
    model = block()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
    loss = model(make_input()).square().sum()
    loss.backward(retain_graph=True)
    assert len(decoded) == 2 and all(ref() is None for ref in decoded), "though backward may be run again"
    del loss
    assert session.ledger.held == 0
    session.detach()


def test_a_dropped_forward_leaves_nothing():
    """Also while the norm's input waits for what ReLU makes."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(self.body[0].weight.new_zeros(()) + x)
            F.relu(y)
            raise RuntimeError("stop")

    gc.collect()
    gc.disable()
    try:
        model = Broken()
        session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="stop"):
                model(make_input())
            assert session.ledger.held == session.ledger.raw == 0
        session.detach()
    finally:
        gc.enable()


@pytest.mark.parametrize("changed", ["norm's input", "what ReLU made"])
def test_what_is_changed_in_place_is_noticed(changed):
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = F.relu(self.norm(x))
            result = self.last(y)
            (x if changed == "norm's input" else y).detach().mul_(2)
            return result

    model = Changed()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
    with pytest.raises(ModifiedError, match="modified by an inplace operation"):
        model(make_input()).sum().backward()
    session.detach()


@pytest.mark.parametrize(
    "rule",
    [
        {"path": "1", "keep": True},
        {"path": "1", "bound": "0.1 std"},
        {"path": "3", "keep": True},
        {"path": "3", "bound": 0.01},
        {"path": "3", "codec": "cast"},
        {"path": "2", "keep": True},
        {"path": "3", "store": "host"},
    ],
    ids=lambda rule: ",".join(f"{key}={value}" for key, value in rule.items()),
)
def test_a_rule_for_either_is_obeyed(rule):
    model, x = block(), make_input()
    plain = gradients(model, x)
    got, session = run(model, x, rules=[rule])
    assert not is_joint(session) and "1:native_batch_norm.input+relu" not in payloads(session)
    assert distance(got, plain) < 0.3


def test_few_values_a_channel_are_not_worth_it():
    model, x = block(), torch.randn(3, 3, 12, 12)
    _, session = run(model, x)
    assert not is_joint(session)


def test_nothing_is_joint_where_nothing_is_made_again():
    model, x = block(), make_input()
    plain = gradients(model, x)
    assert not is_joint(run(model, x, remake=False)[1])
    session = lowtide.attach(model, "exact", min_size=0, remake=True)
    got = gradients(model, x)
    session.detach()
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@pytest.mark.parametrize("part", ["made", "source", "mask"])
def test_a_broken_promise_is_noticed(part, monkeypatch):
    """Checks look at what comes out of the payload, not only at the payload."""
    right = getattr(fold, part)
    wrong = (lambda *given: -right(*given)) if part == "mask" else (lambda *given: right(*given) + 3)
    model = block()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True, check=True)
    monkeypatch.setattr("lowtide.kernels._fold." + part, wrong)
    with pytest.raises(BoundViolationError, match={"made": "3:conv", "source": "1:native", "mask": "2:relu"}[part]):
        model(make_input()).sum().backward()
    session.detach()


def test_a_session_goes_on_where_another_one_stopped():
    """The same noise, so the same gradients: bounds of both, and of what they are together, are in the state."""
    model, x = block(), make_input()

    def attach() -> Session:
        return lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True, **BOUNDS)

    def step(session: Session) -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        session.step()
        return [parameter.grad.clone() for parameter in model.parameters()]

    first = attach()
    for _ in range(3):
        step(first)
    state = first.state_dict()
    expected = step(first)
    first.detach()
    second = attach()
    second.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(step(second), expected, strict=True))
    second.detach()


def test_modules_that_are_run_again():
    """The input of such a module is what ReLU made: rules of its own say how that is held."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Sequential(nn.Conv2d(8, 8, 3), nn.Tanh()), nn.Flatten()
    )
    x = torch.randn(16, 3, 12, 12)
    plain = gradients(model, x)
    got, session = run(model, x, recompute=["3"])
    assert payloads(session) == {"1:native_batch_norm.input", "3:recompute.input"}
    assert 0 < distance(got, plain) < 0.3


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, True),
        ({"pairs": False}, False),
        ({"remake": False}, False),
        ({"memory": 0.5}, False),
        ({"memory": 0.5, "pairs": True}, True),
        ({"memory": 0.5, "remake": True}, True),
    ],
)
def test_budget_looks_for_pairs_unless_there_is_memory_to_fill(options, found):
    """In a bottleneck ReLU's mask and the values of the same tensor are settled apart: no pair is met by halves."""
    entry = zoo.describe("resnet50")
    model = entry.build(**entry.tiny)
    inputs, target = entry.example(4, **entry.tiny)
    session = lowtide.attach(model, "budget", min_size=1024, period=2, **options)
    for _ in range(4):
        entry.loss(model(inputs), target).backward()
        session.step()
    sites = session.ledger.sites
    pair = [sites[name].held_nbytes for name in ("bn1:native_batch_norm.input", "layer1.0.conv1:convolution.input")]
    assert (abs(pair[0] - pair[1]) <= 1) is found
    assert not any(site.codec.startswith("again") for site in sites.values())
    session.detach()
