"""The twins of ``division``, ``norm_groups`` and ``sample_groups`` on a device: the codec's bytes, and no waiting.

Those and ``groups`` inside of a CUDA graph, too.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from division_cases import BITS, DTYPES, Case, check, make_cases, make_tile_cases
from no_waiting import no_waiting
from replay_cases import check as check_replays
from replay_cases import make_cases as make_replay_cases
from same_payload import assert_same_payload, assert_same_values

from lowtide import codecs, kernels
from lowtide.codecs.division import Division
from lowtide.kernels import _nvrtc
from lowtide.kernels._workspaces import Cell, Replay

pytestmark = pytest.mark.gpu
TWINS = ("CUDA C++", "Triton")


def kind_of(twin: str) -> Any:
    pytest.importorskip("triton")
    if twin == "Triton":
        from lowtide.kernels.division import DivisionKernel

        return DivisionKernel
    if not _nvrtc.available():
        pytest.skip("NVRTC is not installed")
    from lowtide.kernels._division_cuda import DivisionCuda

    return DivisionCuda


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_equals_codec_here_and_on_the_cpu(dtype: str, twin: str) -> None:
    for case in (*make_cases(DTYPES[dtype]), *make_tile_cases(DTYPES[dtype])):
        check(case, torch.device("cuda"), against_cpu=True, kind=kind_of(twin))


def test_the_twin_in_cuda_is_chosen_where_it_can_be() -> None:
    kind_of("CUDA C++")
    chosen = kernels.twin(Division(), torch.device("cuda"), torch.float32)
    assert type(chosen).__name__ == "DivisionCuda"
    assert kernels.twin(Division(faithful=True), torch.device("cuda"), torch.float32) == Division(faithful=True)


@pytest.mark.parametrize(
    "shape", [(8, 64, 56, 56), (4, 96, 14, 14), (3, 50, 7, 7), (2, 24, 112, 112), (300, 768)], ids=str
)
@pytest.mark.parametrize("twin", TWINS)
def test_fresh_random_tensors(shape: tuple[int, ...], twin: str) -> None:
    """Different values in every run: the seed is in the name of the case, which a failure shows."""
    seed = torch.seed() % (1 << 31)
    random = torch.Generator().manual_seed(seed)
    for bits, dtype in zip(BITS, [*DTYPES.values(), torch.float32], strict=True):
        x = torch.randn(shape, generator=random).to(dtype)
        case = Case(f"random, seed {seed}", x, Division(bits), seed=seed)
        check(case, torch.device("cuda"), against_cpu=True, kind=kind_of(twin))
        if x.dim() == 4:
            last = x.contiguous(memory_format=torch.channels_last)
            case = Case(f"random, seed {seed}", last, Division(bits), seed=seed)
            check(case, torch.device("cuda"), kind=kind_of(twin))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [31, 32])  # samples of the latter are whole groups
def test_nothing_waits_for_the_device(side: int, dtype: str, layout: torch.memory_format) -> None:
    x = torch.randn(4, 24, side, side, device="cuda").to(DTYPES[dtype]).contiguous(memory_format=layout)
    x[0, 0, 0, 0] = torch.nan
    for codec in (codecs.create("division"), codecs.create("norm_groups"), codecs.create("sample_groups", bits=3.0)):
        twin = kernels.twin(codec, x.device, x.dtype)
        twin.decode(twin.encode(x))  # compiles
        with no_waiting():
            decoded = twin.decode(twin.encode(x, seed=3))
        assert decoded.stride() == x.stride()


@pytest.mark.parametrize("name", ["norm_groups", "sample_groups"])
def test_composed_twins_equal_their_codecs(name: str) -> None:
    layouts, shapes = (torch.contiguous_format, torch.channels_last), ((6, 40, 9, 11), (6, 40, 16, 8))
    for layout, shape in itertools.product(layouts, shapes):  # samples of the second are whole groups
        x = torch.randn(shape, device="cuda").contiguous(memory_format=layout)
        codec = codecs.create(name, bits=3.0)
        twin = kernels.twin(codec, x.device, x.dtype)
        payload = codec.encode(x, seed=5)
        assert_same_payload(twin.encode(x, seed=5), payload, name)
        assert_same_values(twin.decode(payload), codec.decode(payload), name, any_nan=True)


def test_replays_draw_anew() -> None:
    for case in make_replay_cases():
        check_replays(case, torch.device("cuda"))


@pytest.mark.parametrize("twin", TWINS)
def test_replays_of_either_twin_draw_anew(twin: str) -> None:
    divisions = [case for case in make_replay_cases() if case[0].name == "division"]
    assert len(divisions) >= 3
    for case in divisions:
        check_replays(case, torch.device("cuda"), kind=kind_of(twin))


def test_a_captured_encoder_draws_anew_in_every_replay() -> None:
    device = torch.device("cuda")
    for codec, values in make_replay_cases():
        x = values.to(device)
        twin, cell = kernels.twin(codec, device, x.dtype), Cell(device)
        replay = Replay(cell)
        twin.decode(twin.encode(x, seed=5, replay=replay))  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cell.advance()
            decoded = twin.decode(twin.encode(x, seed=5, replay=replay))
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append(decoded.clone())
            expected = twin.decode(twin.encode(x, seed=5, replay=replay))  # the number is that of the replay
            assert_same_values(seen[-1], expected, str(codec), any_nan=True)
        assert not any(torch.equal(one, other) for one, other in itertools.combinations(seen, 2)), codec
