"""Modules that are run again in backward: bit-equal to plain training where their inputs are held exactly."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from recompute_nets import assert_same, attach, images, make, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.app import zoo
from lowtide.errors import AttachError, PolicyError
from lowtide.ledger import Ledger
from lowtide.recompute import Region


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [True, "blocks.*", ["stem", "blocks.1"], "*.conv"], ids=str)
def test_with_exact_boundaries_training_is_bit_equal(recompute: Any, bf16: bool) -> None:
    expected = train(make(), bf16=bf16)
    model = make()
    session = attach(model, recompute=recompute)
    assert_same(train(model, bf16=bf16), expected)
    assert (session.ledger.raw, session.ledger.held) == (0, 0)


def test_a_block_runs_once_in_forward_and_once_in_backward() -> None:
    model = make()
    attach(model)
    model(images()).sum().backward()
    assert [block.runs for block in model.blocks] == [2, 2, 2]


def test_the_second_run_ends_when_all_is_saved() -> None:
    """What comes after the last save of a module is not computed again."""
    after: list[str] = []

    class Tail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sigmoid()
            after.append("ran")
            return x + 1

    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), Tail()))
    attach(model, recompute="1")
    model(torch.randn(8, 32)).sum().backward()
    assert after == ["ran"]


def test_of_what_the_modules_save_nothing_is_held_and_all_is_counted() -> None:
    """``raw`` is what plain training holds, as the method ``exact`` alone counts it."""

    def ledger(**options: Any) -> Ledger:
        model = make()
        session = attach(model, **options)
        model(images()).sum().backward()
        return session.ledger

    plain, ours = ledger(recompute=False), ledger()
    assert ours.raw_peak == plain.raw_peak
    assert ours.held_peak < 0.6 * plain.held_peak
    inside = [entry for entry in ours.sites.values() if entry.codec == "recomputed"]
    assert [entry.name for entry in inside] == [f"blocks.{i}:recompute.inside" for i in range(3)]
    assert all(entry.raw_nbytes > 0 and entry.held_nbytes == 0 for entry in inside)
    boundaries = [name for name in ours.sites if name.startswith("blocks.2:recompute.input")]
    assert boundaries == ["blocks.2:recompute.input", "blocks.2:recompute.input#1"], "x, and the gate"


def test_inputs_are_held_under_a_bound_that_can_be_chosen() -> None:
    gradients = {}
    for boundary in ("exact", "0.001 std", "0.5 std"):
        model = make()
        session = attach(model, "fixed", boundary=boundary, check="full")
        torch.manual_seed(0)
        model(images()).square().sum().backward()
        gradients[boundary] = torch.cat([p.grad.flatten() for p in model.blocks.parameters() if p.grad is not None])
        entry = session.ledger.sites["blocks.0:recompute.input"]
        assert (entry.codec, entry.bound) == (("kept", "") if boundary == "exact" else ("sz", boundary))
    distances = [
        (gradients[b] - gradients["exact"]).norm() / gradients["exact"].norm() for b in ("0.001 std", "0.5 std")
    ]
    assert 0 < distances[0] < 0.02 < distances[1]


@pytest.mark.parametrize(
    ("method", "bound"), [("fixed", "0.02 std"), ("recompute", "0.02 std"), ("exact", ""), ("offload", "")]
)
def test_the_default_boundary_is_that_of_the_method(method: str, bound: str) -> None:
    model = make()
    session = lowtide.attach(model, method, min_size=64, **({} if method == "recompute" else {"recompute": True}))
    model(images()).sum().backward()
    assert session.ledger.sites["blocks.1:recompute.input"].bound == bound


def test_the_method_by_its_name() -> None:
    """Its own option names the modules, or ``recompute`` does; ``boundary`` is heard either way."""
    for options in ({"modules": "blocks.1"}, {"recompute": "blocks.1"}):
        model = make()
        session = lowtide.attach(model, "recompute", min_size=64, boundary="0.3 std", **options)
        model(images()).sum().backward()
        found = {name: entry.bound for name, entry in session.ledger.sites.items() if ":recompute.input" in name}
        assert found == {"blocks.1:recompute.input": "0.3 std", "blocks.1:recompute.input#1": "0.3 std"}
    with lowtide.compress(None, "recompute", min_size=64) as session:  # no module to run again, and no mistake
        images().requires_grad_().tanh().exp().sum().backward()
    assert "(model):tanh.result" in session.ledger.sites


def test_rules_reach_the_boundaries() -> None:
    model = make()
    rules = [lowtide.Rule(path="blocks.1", op="recompute", keep=True), lowtide.Rule(op="recompute", bound="0.1 std")]
    session = attach(model, "fixed", rules=rules)
    model(images()).sum().backward()
    sites = session.ledger.sites
    assert sites["blocks.1:recompute.input"].codec == "kept"
    assert sites["blocks.2:recompute.input"].bound == "0.1 std"


def test_an_input_that_others_save_too_is_held_once() -> None:
    """The ReLU before a block saves its output, which is the block's input: one payload, with a code for zero."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    session = attach(model, "fixed", recompute="2")
    output = model(torch.randn(64, 64))
    sites = session.ledger.sites
    assert sites["1:relu.result"].codec == "in sz" and sites["1:relu.result"].held_nbytes == 0
    assert sites["2:recompute.input"].held_nbytes > 0
    output.sum().backward()


def test_backward_runs_twice_over_a_graph_that_is_retained() -> None:
    def gradients(ours: bool) -> list[Tensor]:
        model = make()
        if ours:
            attach(model)
        torch.manual_seed(0)
        loss = model(images()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(*pair) for pair in zip(gradients(False), gradients(True), strict=True))


def test_second_derivatives() -> None:
    def penalty(ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 1))
        if ours:
            attach(model, recompute="1")
        x = torch.randn(8, 16, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for plain, ours in zip(penalty(False), penalty(True), strict=True):
        assert torch.equal(plain, ours)


def test_a_saved_tensor_may_be_looked_at_outside_of_backward() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    session = attach(model, recompute="1")
    output = model(torch.randn(8, 16))
    assert torch.equal(output.grad_fn._saved_result, output)  # type: ignore[union-attr]
    assert torch.equal(output.grad_fn._saved_result, output)  # type: ignore[union-attr]
    output.sum().backward()
    del output
    assert session.ledger.held == 0


def test_a_whole_block_of_code_under_compress_with_its_backward_inside() -> None:
    expected, model = train(make(), steps=1), make()
    torch.manual_seed(2)
    with lowtide.compress(model, "exact", recompute=True, min_size=64) as session:
        model(images()).square().mean().backward()
    assert session.ledger.sites["blocks.0:recompute.input"].saves == 1, "the second run is not a run to record"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[f"0 {name}"]), name  # type: ignore[arg-type]


def test_a_shared_block_and_a_block_in_a_block() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    def gradients(recompute: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Twice())
        if recompute:
            attach(model, recompute=recompute)
        model(torch.randn(8, 16)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(None)
    for recompute in ("1", "1.inner", ["1", "1.inner"]):
        assert all(torch.equal(*pair) for pair in zip(expected, gradients(recompute), strict=True))


def test_a_part_that_a_block_has_twice() -> None:
    """Its buffers are the same tensors afterwards."""

    def run(ours: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16)
        model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(norm, nn.Linear(16, 16), norm, nn.Tanh()))
        if ours:
            attach(model, recompute="1")
        before = [id(buffer) for buffer in norm.buffers()]
        model(torch.randn(8, 16)).square().sum().backward()
        assert [id(buffer) for buffer in norm.buffers()] == before
        return model.state_dict() | {name: p.grad for name, p in model.named_parameters()}  # type: ignore[dict-item]

    assert_same(run(True), run(False))


def test_a_checkpoint_inside_of_a_module_that_is_run_again() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(lambda y: self.second(y).tanh(), self.first(x), use_reentrant=False)
            return result.sigmoid()

    def gradients(ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Inner())
        if ours:
            attach(model, recompute="1")
        model(torch.randn(8, 16)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(*pair) for pair in zip(gradients(False), gradients(True), strict=True))


def test_hooks_inside_of_the_model_come_first() -> None:
    """What they take does not come back to us, so running the module again would be in vain."""

    class OnCpu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                result: Tensor = self.part(x)
            return result

    model = nn.Sequential(nn.Linear(16, 16), OnCpu())
    session = attach(model, recompute="1.part")
    model(torch.randn(8, 16)).sum().backward()
    assert not [name for name in session.ledger.sites if "recompute" in name]


def test_what_a_second_run_saved_goes_as_backward_gets_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[weakref.ref[Tensor]] = []
    run_again = Region._run_again

    def watched(region: Region) -> Any:
        found = run_again(region)
        saved.extend(weakref.ref(pair[0]) for pair in found if pair is not None)
        return found

    monkeypatch.setattr(Region, "_run_again", watched)
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(*[nn.Tanh() for _ in range(8)]))
    attach(model, recompute="1")
    alive: list[int] = []
    for layer in model[1]:
        layer.register_full_backward_hook(lambda *_: alive.append(sum(ref() is not None for ref in saved)))
    model(torch.randn(8, 16)).sum().backward()
    assert len(saved) == 8 and alive[0] >= 6 and alive[4] <= 4, alive


def test_without_gradients_nothing_is_recorded() -> None:
    model = make()
    session = attach(model)
    with torch.no_grad():
        model(images())
    assert session.ledger.sites == {} and [block.runs for block in model.blocks] == [1, 1, 1]


def test_detaching_leaves_no_trace_and_graphs_keep_what_they_need() -> None:
    model = make()
    session = attach(model)
    torch.manual_seed(2)
    loss = model(images()).square().mean()
    session.detach()
    loss.backward()
    expected = train(make(), steps=1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[f"0 {name}"])  # type: ignore[arg-type]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_copies_and_pickles_of_the_model_are_plain() -> None:
    model = make()
    attach(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(train(twin), train(make()))
        assert all(block.runs == 3 for block in twin.blocks)


def test_a_graph_that_is_dropped_takes_its_inputs_along() -> None:
    model = make()
    session = attach(model)
    output = model(images())
    assert session.ledger.held > 0
    node = weakref.ref(output)
    gc.disable()
    try:
        del output
        assert node() is None and (session.ledger.held, session.ledger.raw) == (0, 0)
    finally:
        gc.enable()


def test_which_modules_are_chosen() -> None:
    def chosen(model: nn.Module, recompute: Any) -> list[str]:
        session = attach(model, recompute=recompute)
        session.detach()
        return sorted(session._scopes.regions.paths.values())  # type: ignore[union-attr]

    build = lambda name: zoo.describe(name).build(**zoo.describe(name).tiny)  # noqa: E731
    assert chosen(make(), True) == ["blocks.0", "blocks.1", "blocks.2"]
    assert chosen(make(), "blocks*") == ["blocks.0", "blocks.1", "blocks.2"], "a list does not run, its members do"
    assert chosen(make(), ["*"]) == ["blocks.0", "blocks.1", "blocks.2", "head", "stem"], "all but the model itself"
    assert chosen(build("resnet18"), "layer?") == ["layer1", "layer2", "layer3", "layer4"]
    assert chosen(build("resnet18"), True)[:3] == ["layer1.0", "layer1.1", "layer2.0"]
    assert chosen(build("alexnet"), True) == ["classifier", "features"], "no blocks: its parts"


def test_mistakes_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"recompute='bloks.\*' matches no module. Module paths here: stem, blocks"):
        attach(make(), recompute="bloks.*")
    with pytest.raises(PolicyError, match="recompute=True: this model has no parts"):
        attach(nn.Sequential(nn.Flatten(), nn.ReLU()))
    with pytest.raises(AttachError, match="boundary says how the inputs of recomputed modules are held"):
        lowtide.attach(make(), boundary="exact")
    with pytest.raises(AttachError, match="recompute runs modules again, so it needs a model"):
        lowtide.compress(None, recompute=True).__enter__()


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "gpt2_small", "unet", "alexnet", "lstm"])
def test_models_of_the_zoo_are_bit_equal_with_exact_boundaries(name: str) -> None:
    entry = zoo.describe(name)

    def gradients(ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = entry.build(**entry.tiny)
        if ours:
            attach(model)
        inputs, target = entry.example(4, generator=torch.Generator().manual_seed(0), **entry.tiny)
        entry.loss(model(inputs), target).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(*pair) for pair in zip(gradients(False), gradients(True), strict=True))


def test_a_first_block_whose_input_the_caller_holds_is_no_reason_to_warn(recwarn):
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.Flatten(), nn.Linear(7200, 4))
    lowtide.attach(model, recompute="0")
    model(torch.randn(8, 3, 32, 32)).sum().backward()
    assert not [str(item.message) for item in recwarn]


@pytest.mark.parametrize("is_inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("cache", [False, True], ids=["anew", "cached"])
def test_autocast_is_as_it_was_in_the_first_run_and_afterwards_as_before(cache: bool, is_inside: bool) -> None:
    seen: list[tuple[bool, torch.dtype, bool]] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(now())
            return self.linear(x).tanh()

    def now() -> tuple[bool, torch.dtype, bool]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    model = nn.Sequential(nn.Linear(16, 16), Looks())
    attach(model, recompute="1")
    before = now()
    with torch.autocast("cpu", torch.float16, cache_enabled=cache):
        loss = model(torch.randn(8, 16)).float().sum()
        if is_inside:
            loss.backward()
            assert now() == (True, torch.float16, cache)
    if not is_inside:
        loss.backward()
    assert seen == [(True, torch.float16, cache)] * 2
    assert now() == before
    assert torch.autocast_decrement_nesting() == -1 and torch.autocast_increment_nesting() == 0


def test_casts_that_a_second_run_makes_go_with_it() -> None:
    """Autocast keeps casts of weights as long as it is on, and would take one of old weights for one of new ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    attach(model, recompute="1")
    x, weight = torch.randn(8, 16), model[1][0].weight
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()
    with torch.no_grad():
        weight.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.nn.functional.linear(x, weight).any()


def test_saves_are_counted_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()))
    session = attach(model, recompute="1")
    for _ in range(2):
        model(torch.randn(64, 64)).sum().backward()
        session.step()
    entry = session.ledger.sites["1:recompute.inside"]
    assert entry.saves == 4 and entry.raw_nbytes == 2 * 64 * 64 * 4, (
        "a weight, and what each tanh has made; the input is held"
    )


def test_inputs_come_back_as_they_were_given() -> None:
    """In lists and by keyword, numbers and None among them."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def forward(self, pair: list[Tensor], *, factor: float, nothing: None = None) -> Tensor:
            self.seen.append((len(pair), factor, nothing, pair[0].requires_grad, pair[1].requires_grad))
            return (pair[0] * pair[1] * factor).tanh()

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.takes = nn.Linear(16, 16), Takes()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.takes([self.linear(x), x], factor=0.5)
            return result

    model = Gives()
    attach(model, recompute="takes")
    model(torch.randn(8, 16)).sum().backward()
    assert model.takes.seen == [(2, 0.5, None, True, False)] * 2
