"""What holds for every method in the registry: a new file in ``lowtide.methods`` is tested here without an edit."""

from __future__ import annotations

import copy
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_nets import NETS, Net
from torch import Tensor, nn

import lowtide
from lowtide import methods
from lowtide.errors import StateError, UnknownNameError
from lowtide.registry import METHODS

STEPS = 20
DOCS = Path(__file__).parents[2] / "docs" / "methods"


@pytest.fixture(params=METHODS.names())
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=["conv", "attention"])
def net(request: pytest.FixtureRequest) -> Net:
    return NETS[request.param]


class Run:
    """A net in training under a method."""

    def __init__(
        self, net: Net, method: str, *, bf16: bool = False, channels_last: bool = False, **options: Any
    ) -> None:
        self.net, self.model, self.bf16, self.losses = net, net.model(), bf16, [0.0][:0]
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.channels_last = channels_last
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        self.session = lowtide.attach(self.model, method, optimizer=self.optimizer, min_size=512, **options)

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            self.optimizer.zero_grad()
            inputs, target = self.net.batch(step)
            if self.channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                output = self.model(inputs)
            loss = F.cross_entropy(output.float(), target)
            loss.backward()
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
        return self

    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]


def test_the_class_is_a_frozen_dataclass_that_makes_a_codec_and_a_new_controller(method: str) -> None:
    chosen = methods.create(method)
    assert type(chosen).__dataclass_params__.frozen
    assert methods.create(method) == chosen
    first, second = chosen.controller(), chosen.controller()
    assert first is not second, "two sessions would share their bounds"
    codec = chosen.values()
    assert codec is None or codec.carries_values


@pytest.mark.parametrize("option", ["no_such_option", "seeed"])
def test_an_unknown_option_is_refused_by_name(method: str, option: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown option of method '{method}' '{option}'; known: "):
        lowtide.attach(nn.Linear(2, 2), method, **{option: 1})


def test_an_unknown_method_lists_the_known_and_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown method 'divison'; known: .*\. Did you mean 'division'\?"):
        lowtide.attach(nn.Linear(2, 2), "divison")


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")  # a method may find nothing to do in a net
@pytest.mark.parametrize(
    ("kind", "bf16"), [("conv", False), ("conv", True), ("attention", True), ("recurrent", False)], ids=str
)
def test_training_goes_well_and_holds_less(kind: str, method: str, bf16: bool) -> None:
    """Twenty steps: finite losses that fall, the forward as it was, everything given back after backward."""
    net = NETS[kind]
    run = Run(net, method, bf16=bf16, channels_last=bf16)
    plain = Run(net, "exact", bf16=bf16, channels_last=bf16)
    assert run.train(0, 1).losses == plain.train(0, 1).losses, "the first forward is not that of plain training"
    run.train(1, STEPS)
    losses = torch.tensor(run.losses)
    assert bool(losses.isfinite().all())
    assert float(losses[-5:].mean()) < 0.95 * float(losses[:3].mean())
    ledger = run.session.ledger
    assert (ledger.raw, ledger.held) == (0, 0), "backward left something held"
    assert 0 < ledger.held_peak <= ledger.raw_peak, "more is held than in plain training"


def test_results_are_a_function_of_the_seed(net: Net, method: str, assert_same: Any) -> None:
    first = Run(net, method, seed=5).train(0, 2)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = Run(net, method, seed=5)
    torch.set_rng_state(state)
    assert_same(first.weights(), second.train(0, 2).weights())
    assert torch.equal(torch.get_rng_state(), state), "the method drew from the global random numbers"


def test_masks_stay_exact(method: str) -> None:
    """A ReLU passes gradients where its input was positive, whatever a method makes of values."""
    if hasattr(methods.create(method), "regions"):
        pytest.skip("where modules are run again, masks are those of their stored inputs")
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(4, 8, 1), block, nn.Conv2d(8, 8, 1))
    x = torch.randn(4, 4, 16, 16)
    seen: list[Tensor] = []
    block[0].register_forward_hook(lambda module, args, output: output.register_hook(seen.append) and None)
    model(x).sum().backward()
    session = lowtide.attach(model, method, min_size=512)
    model(x).sum().backward()
    session.detach()
    plain, ours = seen
    assert torch.equal(plain, ours) and 0 < int((plain == 0).sum()) < plain.numel()


def test_backward_twice_gives_the_same(net: Net, method: str, assert_same: Any) -> None:
    """Payloads are decoded anew each time and must not differ."""
    run = Run(net, method)
    inputs, target = net.batch()
    loss = F.cross_entropy(run.model(inputs), target)
    gradients = [torch.autograd.grad(loss, list(run.model.parameters()), retain_graph=True) for _ in range(2)]
    assert_same(*[list(each) for each in gradients])


def test_a_resumed_run_is_bit_equal(net: Net, method: str, assert_same: Any) -> None:
    straight = Run(net, method).train(0, 4)
    stopped = Run(net, method).train(0, 2)
    file = io.BytesIO()
    parts = ("model", "optimizer", "session")
    torch.save({name: getattr(stopped, name).state_dict() for name in parts}, file)
    file.seek(0)
    resumed = Run(net, method)
    for name, state in torch.load(file, weights_only=True).items():
        getattr(resumed, name).load_state_dict(state)
    assert_same(straight.weights(), resumed.train(2, 4).weights())


def test_the_state_of_another_method_is_refused(method: str) -> None:
    other = "exact" if method != "exact" else "fixed"
    model = NETS["conv"].model
    state = lowtide.attach(model(), other).state_dict()
    session = lowtide.attach(model(), method)
    before = copy.deepcopy(session.state_dict())
    with pytest.raises(StateError, match=f"state belongs to method '{other}', this session runs '{method}'"):
        session.load_state_dict(state)
    assert session.state_dict() == before


def test_every_site_is_reported_with_its_reason(net: Net, method: str) -> None:
    run = Run(net, method).train(0, 2)
    report = run.session.report().to_dict()
    assert report["method"] == method and report["sites"]
    assert all(site["codec"] and (site["reason"] or site["codec"] != "kept") for site in report["sites"])
    assert str(run.session.report())


def test_a_page_says_what_the_method_does(method: str) -> None:
    """What is stored, the bound or its absence, the defaults: every option is named."""
    page = (DOCS / f"{method}.md").read_text(encoding="utf-8")
    missing = [item.name for item in dataclasses.fields(METHODS.load(method)) if f"`{item.name}`" not in page]
    assert not missing, f"docs/methods/{method}.md does not name the options {missing}"
