"""The emulator names accesses to memory that nothing orders, whatever came of them, and no others."""

from __future__ import annotations

import ctypes

import pytest
import torch
from simt import Emulated, requires_compiler

from lowtide.errors import LowtideError
from lowtide.kernels._nvrtc import Program

pytestmark = [requires_compiler, pytest.mark.races]

COUNT = 64  # threads of a block: two warps


class Arguments(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("way", ctypes.c_uint))


def launch(ways: list[str], way: int, *, blocks: int = 1) -> torch.Tensor:
    """Run a kernel that does one of several things with its memory, by their number."""
    cases = "\n".join(f"case {number}: {{ {body} }} break;" for number, body in enumerate(ways))
    source = f"""
struct Arguments {{ unsigned* data; unsigned way; }};
struct alignas(16) Four {{ unsigned v[4]; }};
__global__ void kernel(Arguments a) {{
    __shared__ unsigned shared[256];
    __shared__ Four fours[64];
    unsigned i = threadIdx.x, lane = i % 32, warp = i / 32, at = blockIdx.x * blockDim.x + i;
    switch (a.way) {{
{cases}
    }}
}}
"""
    data = torch.zeros(1024, dtype=torch.int32)
    function = Emulated(Program("races", source)).function("kernel")
    function.launch(blocks, COUNT, 0, bytes(Arguments(data.data_ptr(), way)))
    return data


RACES = [
    # what one thread writes another reads
    "shared[i] = i; a.data[at] = shared[i ^ 1];",
    # the other way round: a barrier is missing before memory is written again
    "shared[i] = i; __syncthreads(); a.data[at] = shared[(i + 1) % 64]; shared[i] = 7;",
    # another warp's, with no barrier for the block
    "shared[i] = i; __syncwarp(); a.data[at] = shared[i ^ 32];",
    # lanes have met, but a vote orders nothing in memory
    "shared[i] = i; __ballot_sync(~0u, 1); a.data[at] = shared[i ^ 1];",
    "shared[i] = i; unsigned x = __shfl_sync(~0u, i, 3); a.data[at] = shared[i ^ 1] + x;",
    # a mask of half of the lanes orders these only
    "shared[i] = i; __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u); a.data[at] = shared[i ^ 16];",
    # all write the same: still two writes
    "shared[0] = 5;",
    # parts of a word, and words of a vector
    "((unsigned short*)shared)[i] = i; a.data[at] = shared[i / 2];",
    "fours[i] = Four{{i, i, i, i}}; a.data[at] = fours[i ^ 1].v[3];",
    # of global memory: two threads, two blocks
    "a.data[at / 2] = i;",
    "a.data[i] = i;",
    "if (blockIdx.x) a.data[i] = i; else shared[i] = a.data[i];",
    # an atomic beside an ordinary access
    "atomicAdd(a.data, 1u); if (i == 5) shared[0] = a.data[0];",
    "if (i == 5) shared[0] = a.data[0]; atomicAdd(a.data, 1u);",
    # a volatile word may be handed over, what was written before it not (no fence is modelled)
    "a.data[100 + at] = 1; *(volatile unsigned*)a.data = 1; shared[i] = a.data[100 + (at ^ 1)];",
    # many have read it
    "unsigned x = shared[0]; __syncwarp(); a.data[at] = x; if (i == 40) shared[0] = 1;",
]
FINE = [
    "shared[i] = i; __syncthreads(); a.data[at] = shared[63 - i]; __syncthreads(); shared[i] = 7;",
    "shared[i] = i; __syncwarp(); a.data[at] = shared[i ^ 1]; __syncwarp(); shared[i] = 7;",
    "shared[i] = i; __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u); a.data[at] = shared[i ^ 8];",
    "((unsigned char*)shared)[i] = i; a.data[at] = ((unsigned char*)shared)[i];",
    "fours[i] = Four{{i, i, i, i}}; __syncwarp(); a.data[at] = fours[i ^ 1].v[3];",
    "atomicAdd(a.data, 1u); atomicMax(a.data + 1, i); atomicCAS(a.data + 2, 0u, i);",
    "atomicAdd(&shared[0], 1u); __syncthreads(); a.data[at] = shared[0];",
    "atomicAdd(a.data, 1u); if (i == 5) shared[0] = *(volatile unsigned*)a.data;",
    "*(volatile unsigned*)a.data = 1;",
    "unsigned x = shared[0]; __syncthreads(); a.data[at] = x; if (i == 40) shared[0] = 1;",
    # knowledge is passed on: lane 2 knows through lane 1 what lane 0 has written
    "if (lane == 0) shared[warp] = 9; if (lane < 2) __syncwarp(3); if (lane == 1 || lane == 2) __syncwarp(6); "
    "if (lane == 2) a.data[at] = shared[warp];",
    # a thread's own memory
    "unsigned own[4] = {i, i, i, i}; for (unsigned k = 0; k < 4; k++) own[(k + i) % 4] += k; a.data[at] = own[i % 4];",
]


NAMED = (
    r"block \d, thread \d+: race: (reads|writes) (byte \d+ of static shared memory|global memory at 0x[0-9a-f]+), "
    r"which block \d, thread \d+ has (read|written), with nothing between that orders them "
    r"\(races\.cu:\d+ and races\.cu:\d+\)$"
)


@pytest.mark.parametrize("way", range(len(RACES)))
def test_a_race_is_named(way: int) -> None:
    with pytest.raises(LowtideError, match=NAMED):
        launch(RACES, way, blocks=2)


@pytest.mark.parametrize("way", range(len(FINE)))
def test_what_is_ordered_is_no_race(way: int) -> None:
    launch(FINE, way, blocks=2)


def test_both_lines_are_named() -> None:
    """Thread 0 runs first, in block 0; it has read what thread 1 then writes."""
    body = "\nshared[i] = i;\na.data[at] = shared[i ^ 1];\n"
    with pytest.raises(
        LowtideError, match=r"thread 1: race: writes .* thread 0 has read.*\(races.cu:1(\d) and races.cu:1(?!\1)\d\)"
    ):
        launch([body], 0)


def test_results_are_those_without_hooks() -> None:
    assert launch(FINE, 0).tolist()[:COUNT] == list(reversed(range(COUNT)))
    assert launch(FINE, 5)[:3].tolist() == [COUNT, COUNT - 1, 1]  # the first to come that is not 0
