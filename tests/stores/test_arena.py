"""Host memory of the store ``host``: nobody's memory is somebody else's, and what comes back is used again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.errors import LowtideWarning
from lowtide.stores import _arena
from lowtide.stores._arena import Arena, Block

KIB = 1024


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes that were asked for; slabs are small, so that there are many."""
    sizes: list[int] = []

    def pin(nbytes: int, *, least: int) -> Tensor:
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(_arena, "_LEAST", 8 * KIB)
    monkeypatch.setattr(_arena, "_MOST", 64 * KIB)
    monkeypatch.setattr(_arena, "_pin", pin)
    yield sizes


def test_memory_is_cut_to_measure_and_aligned() -> None:
    arena = Arena()
    blocks = [arena.take(nbytes) for nbytes in (1, 511, 512, 513, 7)]
    starts = [block.memory.data_ptr() - blocks[0].memory.data_ptr() for block in blocks]
    assert starts == [0, 512, 1024, 1536, 2560]
    assert [block.memory.numel() for block in blocks] == [1, 511, 512, 513, 7]


def test_steps_like_the_first_ones_pin_nothing_more(pinned: list[int]) -> None:
    arena = Arena()
    counts = []
    for step in range(10):
        blocks = [arena.take(3000 + 700 * number + 512 * (step % 3)) for number in range(20)]
        counts.append(len(pinned))
        while blocks:
            blocks.pop()
    assert len(set(counts[2:])) == 1
    assert len(arena.take(arena._slabs[-1].numel()).memory) == pinned[-1], "what came back is in one piece again"


def test_as_much_is_pinned_as_there_is_already_within_limits(pinned: list[int]) -> None:
    arena = Arena()
    held = [arena.take(8 * KIB) for _ in range(32)]
    assert pinned == [8 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 64 * KIB, 64 * KIB]
    held.append(arena.take(200 * KIB))
    assert pinned[-1] == 200 * KIB


def test_the_mark_of_the_last_copy_comes_with_the_memory() -> None:
    """Of pieces that are joined, the later one."""
    arena = Arena()
    blocks = [arena.take(1024) for _ in range(8)]
    assert {block.mark for block in blocks} == {0}
    for mark, number in ((7, 2), (9, 3), (8, 4)):
        blocks[number].mark = mark
    blocks[2:5] = []
    again = arena.take(3072)
    assert again.mark == 9
    del again
    assert arena.take(512).mark == 9


def test_a_block_may_come_back_at_any_moment() -> None:
    """By garbage collection in the middle of a ``take``: nothing changes under its feet."""
    arena = Arena()
    ring: list[object] = [arena.take(1024)]
    ring.append(ring)
    kept = arena.take(1024)
    del ring
    gc.collect()
    assert len(arena.returned) == 1
    assert arena.take(1024).memory.data_ptr() == kept.memory.data_ptr() - 1024


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), max_size=80))
def test_no_two_blocks_overlap(actions: list[tuple[bool, int]]) -> None:
    arena, held = Arena(), list[Block]()
    for number, (is_taken, choice) in enumerate(actions):
        if is_taken or not held:
            block = arena.take(choice)
            block.memory.fill_(number % 256)
            block.mark = number
            held.append(block)
        else:
            block = held.pop(choice % len(held))
            assert bool((block.memory == block.mark % 256).all())
        del block
    assert all(bool((block.memory == block.mark % 256).all()) for block in held)
    held.clear()
    first = arena.take(1)
    assert [len(free) for free in arena._free] == [1] * len(arena._slabs), "every slab is in one piece again"
    assert sum(stop - start for free in arena._free for start, stop, _ in free) == arena.nbytes - 512
    del first


def test_where_nothing_can_be_pinned_memory_is_pageable_and_one_warning_a_slab_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    asked: list[int] = []
    empty = torch.empty

    def refuse(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
        if pin_memory:
            asked.append(size)
            raise RuntimeError("CUDA error: out of memory\nand more")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(LowtideWarning, match=r"no more host memory can be pinned \(CUDA error: out of memory\):"):
        block = Arena().take(5000)
    assert asked == [1 << 26, 8192], "less is asked for before it is given up"
    assert block.memory.numel() == 5000
