"""Memory over a step: every storage from the op that makes it to its end, and nothing twice."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.app.timeline import MOST_SAMPLES, Timeline

KIB = 1024


def test_storages_count_from_their_op_to_their_end():
    before = torch.zeros(256)
    timeline = Timeline(nn.Identity())
    with timeline.following():
        first = torch.ones(256)
        assert timeline.allocated == KIB
        view = first.view(16, 16).t()
        assert timeline.allocated == KIB
        first += 1
        before += 1
        assert timeline.allocated == KIB
        second = first * 2
        assert timeline.allocated == 2 * KIB
        del first
        assert timeline.allocated == 2 * KIB  # the view keeps it
        del view
        assert timeline.allocated == KIB
        del second
    assert timeline.allocated == 0 and timeline.peak.allocated == 2 * KIB


def test_what_is_held_for_something_else_counts_as_long_as_that_lives():
    class Owner:
        pass

    timeline = Timeline(nn.Identity())
    owner = Owner()
    timeline.hold(owner, 100)
    timeline.hold(owner, 20)
    assert timeline.allocated == 120
    del owner
    assert timeline.allocated == 0


def test_samples_say_phase_and_module():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
    timeline = Timeline(model)
    with timeline.following():
        loss = model(torch.ones(2, 8)).sum()
        with timeline.backward():
            loss.backward()
    forward = [sample.place for sample in timeline.samples if sample.phase == "forward"]
    backward = [sample.place for sample in timeline.samples if sample.phase == "backward"]
    assert list(dict.fromkeys(forward)) == ["", "0", "1.0", "1.1"]  # outside, then the modules in their order
    assert [place for place in dict.fromkeys(backward) if place] == ["1.1", "1.0", "0"]
    assert not model._forward_hooks and not model[0]._forward_pre_hooks


def test_the_stack_survives_a_module_that_raises():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    model = nn.Sequential(nn.Identity(), Fails())
    timeline = Timeline(model)
    with timeline.following():
        try:
            model(torch.ones(1))
        except ValueError:
            assert timeline.place is None


def test_few_samples_keep_the_peak():
    timeline = Timeline(nn.Identity())
    with timeline.following():
        kept = [torch.ones(256)]
        for number in range(2000):
            large = torch.ones(100_000 if number == 1234 else 256)
            if number % 10 == 0:
                kept.append(large)
    thinned = timeline.thinned()
    assert len(thinned) <= MOST_SAMPLES + 2
    assert max(thinned, key=lambda sample: sample.allocated) == timeline.peak
    assert [sample.index for sample in thinned] == sorted(sample.index for sample in thinned)
    assert thinned[-1] == timeline.samples[-1]
