"""Modules that are run again in backward, in CUDA graphs: gradients, random numbers, memory, what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from no_waiting import no_waiting
from test_graphs_cuda import FAMILIES, PRECISIONS, WARMUP, Run, distance, make_step, train_in_flat_memory, warm_up
from torch import Tensor, nn

import lowtide
from lowtide.errors import GraphError
from lowtide.graphs.step import GraphStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]
MODELS = pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "gpt"])
Kind = Callable[..., Tensor]


def assert_same(got: list[Tensor], expected: list[Tensor], repeated: list[Tensor], *, bf16: bool) -> None:
    """Bit-equal where a step repeats itself; ``repeated`` is what ``expected`` is when it is computed once more."""
    noise = distance(repeated, expected)
    if noise == 0:
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True)), distance(got, expected)
    assert distance(got, expected) <= max(4 * noise, 1e-6 if not bf16 else 1e-3)


def replay(run: Run, step: GraphStep, x: Tensor, y: Tensor) -> list[Tensor]:
    replays = step.replays
    found = run.gradients(step, x, y)
    assert step.replays == replays + 1 and not step.overflows, step.describe()
    return found


@PRECISIONS
@MODELS
def test_with_exact_boundaries_a_replay_is_an_eager_step_and_plain_training(name: str, bf16: bool) -> None:
    """The statistics of batch norms among the rest: they count once in a replay, though their modules run twice."""
    run = Run(name, bf16=bf16)
    tide = run.attach("exact", recompute=True, boundary="exact")
    step = tide.graph(run.step, warmup=WARMUP)
    warm_up(run, step)
    assert any(entry.codec == "recomputed" for entry in tide.report().sites)
    state = copy.deepcopy(run.model.state_dict())
    batches, found = [run.batch() for _ in range(4)], []
    for kind in (step, run.step, run.step):
        run.model.load_state_dict(state)
        found.append([run.gradients(kind, *batch) for batch in batches])
        found.append([[buffer.clone() for buffer in run.model.buffers()]])
    assert step.replays == 5 and not step.overflows
    tide.detach()
    run.model.load_state_dict(state)
    plain = [run.gradients(run.step, *batch) for batch in batches]
    replayed, buffers, eager, same, again, _ = found
    for number in range(4):
        assert_same(replayed[number], eager[number], again[number], bf16=bf16)
        assert_same(replayed[number], plain[number], again[number], bf16=bf16)
    for one, other in zip(buffers[0], same[0], strict=True):
        torch.testing.assert_close(one, other)


@PRECISIONS
@pytest.mark.parametrize("name", ["vit_b_16", "gpt"])
@pytest.mark.parametrize("recompute", [True, "blocks.1"], ids=["all", "one"])
def test_dropout_draws_the_same_numbers_in_both_runs_of_every_replay(recompute: Any, name: str, bf16: bool) -> None:
    """And those that an eager step draws, before, in, between and after the modules that are run again."""
    run = Run(name, bf16=bf16, dropout=0.25)
    tide = run.attach("exact", recompute=recompute, boundary="exact")
    step = tide.graph(run.step, warmup=WARMUP)
    warm_up(run, step)
    assert len(step._repeats._plan.starts) == (2 if recompute is True else 1)
    generator = torch.cuda.default_generators[0]
    batch, masks = run.batch(), []
    for seed in (None, None, 5):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        before = torch.cuda.get_rng_state()
        replayed, offset = replay(run, step, *batch), generator.get_offset()
        found = []
        for _ in range(2):
            torch.cuda.set_rng_state(before)
            found.append(run.gradients(run.step, *batch))
            assert generator.get_offset() == offset, "the next step draws other numbers"
        assert_same(replayed, found[0], found[1], bf16=bf16)
        masks.append(replayed)
    assert all(distance(masks[0], other) > 1e-2 for other in masks[1:]), "each replay draws anew"
    before = torch.cuda.get_rng_state()
    replayed = replay(run, step, *batch)
    tide.detach()
    plain = []
    for _ in range(2):
        torch.cuda.set_rng_state(before)
        plain.append(run.gradients(run.step, *batch))
    assert_same(replayed, plain[0], plain[1], bf16=bf16)


def test_a_module_that_begins_to_draw_after_the_rehearsal() -> None:
    """Nothing in the graph provides for it: that replay is taken back, and the next graph knows."""
    run = Run("vit_b_16", bf16=False)
    tide = run.attach("exact", recompute=True, boundary="exact")
    step = tide.graph(run.step, warmup=WARMUP)
    for _ in range(WARMUP):
        run.gradients(step, *run.batch())
    assert not step.captures and not step._repeats._plan.starts
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    batch, before, found = run.batch(), torch.cuda.get_rng_state(), []
    for kind in (step, run.step, run.step):
        torch.cuda.set_rng_state(before)
        found.append(run.gradients(kind, *batch))
    assert (step.captures, step.replays) == (1, 0), "captured, and run eagerly all the same"
    assert_same(*found, bf16=False)
    while not step.replays:
        run.gradients(step, *run.batch())
    assert (step.captures, len(step._repeats._plan.starts)) == (2, 2)
    tide.detach()


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["quiet", "draws"])
def test_a_graph_that_is_retained(dropout: float) -> None:
    """A module that draws has numbers for one second run; others may be run again as often as backward likes."""
    run = Run("vit_b_16", bf16=False, dropout=dropout)
    tide = run.attach("exact", recompute=True, boundary="exact")

    def twice(x: Tensor, y: Tensor) -> Tensor:
        loss = run._entry.loss(run.model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    step = tide.graph(twice, warmup=WARMUP)
    if dropout:
        with pytest.raises(GraphError, match=r"blocks\.\d draws random numbers and would be run again more than once"):
            warm_up(run, step)
        before = torch.cuda.get_rng_state()
        run.gradients(run.step, *run.batch())
        assert not torch.equal(torch.cuda.get_rng_state(), before), "the generator is as good as before"
    else:
        warm_up(run, step)
        batch = run.batch()
        assert_same(replay(run, step, *batch), run.gradients(twice, *batch), run.gradients(twice, *batch), bf16=False)
    tide.detach()


@PRECISIONS
@MODELS
def test_compressed_boundaries_have_the_noise_of_eager_steps_and_dither_of_their_own(name: str, bf16: bool) -> None:
    run = Run(name, bf16=bf16, batch=32)
    tide = run.attach("recompute", boundary="0.3 std")
    step = tide.graph(run.step, warmup=WARMUP, refresh=64)
    warm_up(run, step)
    sites = {gauge.site for gauge in step._recording._gauges}  # type: ignore[union-attr]
    assert sum(":recompute.input" in site for site in sites) >= 2, sites
    x, y = run.batch()
    eager = [run.gradients(run.step, x, y) for _ in range(3)]
    replayed = [replay(run, step, x, y) for _ in range(6)]
    losses = [float(kind(x, y).detach()) for kind in (run.step, step)]
    tide.detach()
    plain = run.gradients(run.step, x, y)
    losses.append(float(run.step(x, y).detach()))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-2 if bf16 else 1e-4), "forward is that of plain training"
    expected = sum(distance(one, plain) for one in eager) / 3
    noise = [distance(one, plain) for one in replayed]
    assert expected > 1e-3 and all(0.6 * expected < item < 1.6 * expected for item in noise), (noise, expected)
    assert all(distance(replayed[0], other) > 0.5 * expected for other in replayed[1:])


def blocks() -> nn.Sequential:
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256))

    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), block(), block(), nn.Linear(256, 8)).cuda()


def test_a_boundary_that_does_not_fit_is_found_and_the_step_repeated_eagerly() -> None:
    model = blocks()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for net in (model, other):
            net[1].weight.fill_(1)
    tides = [lowtide.attach(net, "recompute", boundary=0.05, min_size=0) for net in (model, other)]

    step = tides[0].graph(make_step(model), warmup=WARMUP, refresh=64)
    x = torch.randn(512, 64, device="cuda")
    while not step.replays:
        model.zero_grad()
        step(x)
    with torch.no_grad():
        for net in (model, other):
            net[1].weight.fill_(1000)  # in place: the graph reads it where it was
    other.load_state_dict(model.state_dict())
    state = torch.cuda.get_rng_state()
    model.zero_grad()
    loss = step(x)
    ((_, overflows),) = step.overflows
    assert any("2:recompute.input" in item.site and item.needed > item.room for item in overflows), overflows
    assert "1 overflows, each repeated eagerly" in str(tides[0].report())
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    expected = make_step(other)(x)
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(torch.cuda.get_rng_state(), after)
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two)
    gradients = [[item.grad for item in net.parameters()] for net in (model, other)]
    assert distance(*gradients) < 0.3, "but for the dither they are the same"
    replays = step.replays
    for _ in range(8):
        model.zero_grad()
        step(x)
    assert step.replays > replays and len(step.overflows) == 1
    for tide in tides:
        tide.detach()


@PRECISIONS
def test_beside_the_step_gradients_are_the_same(bf16: bool) -> None:
    """Without dither, and with bounds that are numbers, two graphs store the same values: a race would show."""
    run = Run("vit_b_16", bf16=bf16, batch=64)
    tide = run.attach("fixed", rounding="nearest", recompute=True, boundary=0.02, **dict.fromkeys(FAMILIES, 0.05))
    steps = [tide.graph(run.step, warmup=WARMUP, refresh=64, beside=beside) for beside in (False, True)]
    for step in steps:
        warm_up(run, step)
    for _ in range(8):
        x, y = run.batch()
        alone, again, beside = (run.gradients(step, x, y) for step in (steps[0], steps[0], steps[1]))
        assert distance(beside, alone) <= max(4 * distance(again, alone), 1e-6 if not bf16 else 1e-3)
    assert all(step.replays >= 8 and not step.overflows for step in steps)
    tide.detach()


def test_what_a_graph_holds() -> None:
    """Its pool is as large as a step's peak: the insides of one block in place of those of all, and the inputs."""
    torch.use_deterministic_algorithms(False)
    sizes = []
    for recompute in (None, True):
        torch.cuda.empty_cache()
        run = Run("vit_b_16", bf16=True, batch=256, depth=8, patch_size=4)
        tide = run.attach("exact", recompute=recompute)
        step = tide.graph(run.step, warmup=WARMUP)
        warm_up(run, step)
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated()
        for _ in range(3):
            replay(run, step, *run.batch())
        torch.cuda.synchronize()
        assert abs(torch.cuda.memory_allocated() - used) < 1 << 20, "replays make nothing new but batches and losses"
        assert tide.ledger.held == 0
        sizes.append(step.nbytes)
        tide.detach()
        del run, tide, step
    assert sizes[1] < 0.5 * sizes[0], sizes


@PRECISIONS
def test_memory_does_not_grow(bf16: bool) -> None:
    tide, step = train_in_flat_memory(Run("vit_b_16", bf16=bf16, batch=32, dropout=0.1), "recompute")
    assert not step._strays
    tide.detach()


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["quiet", "draws"])
def test_the_host_does_not_ask_the_device_in_a_replay(dropout: float) -> None:
    run = Run("vit_b_16", bf16=True, dropout=dropout)
    tide = run.attach("recompute")
    step = tide.graph(run.step, warmup=WARMUP, refresh=64)
    warm_up(run, step)
    batch = run.batch()
    with no_waiting():
        run.model.zero_grad()
        step(*batch)
    tide.detach()


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["quiet", "draws"])
def test_a_model_trains_as_well_as_eagerly(dropout: float) -> None:
    results = []
    for is_graphed in (False, True):
        run = Run("gpt", bf16=True, batch=32, dropout=dropout)
        optimizer = torch.optim.SGD(run.model.parameters(), 0.05, momentum=0.9)
        tide = run.attach("recompute", optimizer=optimizer)
        step: Any = tide.graph(run.step, warmup=WARMUP, refresh=16) if is_graphed else run.step
        results.append(float(run.train(step, optimizer, steps=80).detach()))
        tide.detach()
    assert results[1] < 1.5 * results[0] + 0.1, results
