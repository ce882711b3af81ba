"""Memory order against brute force: every address written out, over random orders of the axes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from codec_cases import lay_out

from lowtide.coding import layout
from lowtide.errors import LayoutError
from lowtide.records import TensorSpec

Geometry = tuple[tuple[int, ...], tuple[int, ...]]


def addresses(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The place in memory of every element, in the order of the indices."""
    ranges = [range(size) for size in shape]
    return [sum(i * step for i, step in zip(index, stride, strict=True)) for index in itertools.product(*ranges)]


def draw_dense(count: int) -> list[Geometry]:
    """Random shapes of up to five axes in random orders; an axis of size 1 may have any stride."""
    rng = random.Random(0)
    drawn = []
    for _ in range(count):
        shape = tuple(rng.choice([1, 1, 2, 3, 4]) for _ in range(rng.randint(0, 5)))
        order = list(range(len(shape)))
        rng.shuffle(order)
        stride, step = [0] * len(shape), 1
        for axis in order:
            stride[axis] = step if shape[axis] > 1 else rng.choice([step, 1, 0, 77])
            step *= shape[axis]
        drawn.append((shape, tuple(stride)))
    return drawn


def draw_any(count: int) -> list[Geometry]:
    """Random strides, most of which overlap or leave gaps."""
    rng = random.Random(1)
    drawn = []
    for _ in range(count):
        ndim = rng.randint(1, 4)
        shape = tuple(rng.choice([1, 2, 3]) for _ in range(ndim))
        drawn.append((shape, tuple(rng.choice([0, 1, 2, 3, 4, 6, 9, 12]) for _ in range(ndim))))
    return drawn


def test_is_dense_agrees_with_every_address_written_out() -> None:
    verdicts = []
    for shape, stride in draw_dense(300) + draw_any(2000):
        expected = sorted(addresses(shape, stride)) == list(range(math.prod(shape)))
        assert layout.is_dense(shape, stride) == expected, (shape, stride)
        verdicts.append(expected)
    assert all(verdicts[:300])
    assert 50 < sum(verdicts[300:]) < 1500, "both answers have to be well represented"


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(0),
        torch.zeros(3, 0, 2),
        torch.zeros(0, 4)[:, ::2],
        torch.zeros(3, 8, 0)[:, ::3],
        torch.zeros(1, 0).expand(5, 0),
        torch.zeros(1, 3, 0).expand(5, 3, 0)[:, ::2],
    ],
    ids=lambda x: f"{tuple(x.shape)}, strides {x.stride()}",
)
def test_nothing_has_no_gaps(x: torch.Tensor) -> None:
    assert layout.is_dense(tuple(x.shape), x.stride())
    assert layout.memory_view(x).shape == (0,)


def test_memory_view_lists_the_elements_by_address_and_restore_undoes_it() -> None:
    for shape, stride in draw_dense(200):
        base = torch.arange(5.0, 5.0 + math.prod(shape) + 9)
        x = base.as_strided(shape, stride, 7)
        flat = layout.memory_view(x)
        assert flat.tolist() == [12.0 + i for i in range(math.prod(shape))]
        assert flat.data_ptr() == x.data_ptr()
        back = layout.restore(flat.clone(), TensorSpec.of(x))
        assert torch.equal(back, x)
        assert back.stride() == x.stride()


@pytest.mark.parametrize("look", [layout.memory_view, layout.spec_of])
def test_gaps_and_overlap_are_refused(look: Callable[[torch.Tensor], object]) -> None:
    message = r"tensor of shape \(4, 3\) and strides \(6, 2\) overlaps or has gaps; code x.clone\(\)"
    with pytest.raises(LayoutError, match=message):
        look(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(LayoutError, match=r"strides \(0,\) overlaps"):
        look(torch.zeros(1).expand(3))


def test_spec_of_a_dense_tensor_is_its_own() -> None:
    for shape, stride in draw_dense(50):
        x = torch.zeros(math.prod(shape) + 9).as_strided(shape, stride, 7)
        assert layout.spec_of(x) == TensorSpec(shape, stride, torch.float32, torch.device("cpu"))


def test_index_terms_find_the_table_entry_of_every_element() -> None:
    """The table is contiguous over the axes; element i in memory order sits at some index, found by brute force."""
    rng = random.Random(2)
    for shape, stride in draw_dense(300):
        axes = tuple(sorted(rng.sample(range(len(shape)), rng.randint(0, len(shape)))))
        spec = TensorSpec(shape, stride, torch.float32, torch.device("cpu"))
        expected = [0] * math.prod(shape)
        places = addresses(shape, stride)
        for index, place in zip(itertools.product(*[range(size) for size in shape]), places, strict=True):
            entry = 0
            for axis in axes:
                entry = entry * shape[axis] + index[axis]
            expected[place] = entry
        entries = layout.entries_at(layout.index_terms(spec, axes), torch.arange(math.prod(shape)))
        assert entries.tolist() == expected, (shape, stride, axes)


@pytest.mark.parametrize(("divide", "modulo"), [(1, 6), (7, 5), (4, 3), (35, 1)])
@pytest.mark.parametrize(("start", "stop"), [(0, 210), (0, 1), (13, 14), (11, 97), (35, 70), (209, 210)])
def test_spreading_a_table_is_looking_up_every_element(divide: int, modulo: int, start: int, stop: int) -> None:
    table, term = torch.arange(10, 10 + modulo), (divide, modulo, 1)
    expected = table[layout.entries_at((term,), torch.arange(start, stop))]
    assert torch.equal(layout.spread(table, term, start, stop), expected)


def test_entries_at_answers_for_any_positions() -> None:
    spec = TensorSpec.of(lay_out(torch.zeros(3, 5, 7), (2, 0, 1)))
    terms = layout.index_terms(spec, (0, 1))
    every = layout.entries_at(terms, torch.arange(105))
    chosen = torch.tensor([104, 0, 17, 17])
    assert torch.equal(layout.entries_at(terms, chosen), every[chosen])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_dense_spec_packs_a_view_with_gaps_in_its_own_order_of_axes(order: tuple[int, ...]) -> None:
    whole = lay_out(torch.randn(4, 6, 8), order)
    assert layout.dense_spec(whole) == TensorSpec.of(whole)
    gaps = whole[1:3, ::2, :5]
    assert layout.dense_spec(gaps) == TensorSpec.of(gaps.clone())
    assert layout.is_dense(layout.dense_spec(gaps).shape, layout.dense_spec(gaps).stride)
