"""The gate lets through what was promised, and names what was not."""

from __future__ import annotations

import pytest
import torch

from lowtide.app.bench import gate
from lowtide.records import Bound


@pytest.fixture
def x():
    values = torch.randn(4, 3, 5, 5).relu_()
    values[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return values


def test_an_error_of_exactly_the_bound_passes_and_the_next_number_does_not():
    x, bound = torch.ones(8), Bound.absolute(0.25)
    assert gate.find_fault(x, x + 0.25, bound) == ""
    off = torch.nextafter(torch.tensor(1.25), torch.tensor(2.0))
    assert "gate bound: 8 values are too far off, one by 0.25" in gate.find_fault(x, off.expand(8).clone(), bound)


def test_a_bound_of_a_channel_counts_for_that_channel_in_any_layout(x):
    bound = Bound.absolute(torch.tensor([0.125, 1.0, 0.125]), (1,))
    for saved in (x, x.contiguous(memory_format=torch.channels_last)):
        wrong = saved.clone()
        wrong[:, 1] += 0.5
        assert gate.find_fault(saved, wrong, bound) == ""
        wrong[3, 2, 4, 4] += 0.5
        assert "1 values are too far off, one by 0.5 where 0.125 is promised" in gate.find_fault(saved, wrong, bound)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_has_to_come_back_as_it_was(x, place):
    wrong = x.clone()
    wrong[0, 0, 0, place] = 1.0
    assert gate.find_fault(x, x.clone(), Bound.absolute(1.0)) == ""
    assert "gate bound: 1 values" in gate.find_fault(x, wrong, Bound.absolute(1.0))


def test_every_slab_is_looked_at(monkeypatch):
    monkeypatch.setattr(gate, "_SLAB_CPU", 10)
    x = torch.zeros(25)
    wrong = x.clone()
    wrong[24] = 1
    assert "among elements 20 to 24 of 25" in gate.find_fault(x, wrong, Bound.absolute(0.5))


def test_without_a_bound_finite_values_stay_finite(x):
    assert gate.find_fault(x, torch.zeros_like(x), None) == ""
    wrong = x.clone()
    wrong[1, 1, 1, 1] = torch.nan
    assert "gate finite: 1 finite values" in gate.find_fault(x, wrong, None)


def test_zeros_stay_zeros_and_the_mask_is_exact(x):
    bound, mask = Bound.absolute(0.5), (x != 0).float()
    assert gate.find_fault(x, x.clone(), bound, nonzero=mask) == ""
    moved = torch.where(x == 0, 0.1, x)
    assert "zeros came back as something else" in gate.find_fault(x, moved, bound, nonzero=mask)
    assert "the mask of non-zeros is wrong" in gate.find_fault(x, x.clone(), bound, nonzero=torch.ones_like(x))


def test_shape_dtype_and_strides_count(x):
    assert gate.find_fault(x, x[:1], None).startswith("gate shape")
    assert gate.find_fault(x, x.double(), None).startswith("gate dtype")
    assert gate.find_fault(x, x.contiguous(memory_format=torch.channels_last), None).startswith("gate strides")
