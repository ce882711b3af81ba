"""The kernel that packs views with gaps, on a device: clones bit for bit, streams, captures, no waiting, speed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch
from no_waiting import no_waiting
from packing_cases import DTYPES, Case, check, make_cases
from torch import Tensor

from lowtide.kernels import _nvrtc, _packing
from lowtide.kernels._packing import packed

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _needs_nvrtc() -> None:
    if not _nvrtc.available():
        pytest.skip("NVRTC, or a device that it compiles for, is missing")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks of each launch."""
    grids: list[int] = []
    function = _packing._function(CUDA.index)
    assert function is not None

    class Counted:
        def launch(self, grid: int, *rest: int) -> None:
            grids.append(grid)
            function.launch(grid, *rest)

    monkeypatch.setattr(_packing, "_function", lambda device: Counted())
    return grids


def query(samples: int = 128, tokens: int = 197, heads: int = 12, width: int = 64) -> Tensor:
    """Of one projection, as ViT-B/16 has it."""
    projected = torch.randn(samples, tokens, 3, heads, width, device=CUDA, dtype=torch.bfloat16)
    return projected.permute(2, 0, 3, 1, 4)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_is_a_clone_by_one_launch_where_the_kernel_reaches(dtype: torch.dtype, launches: list[int]) -> None:
    for case in make_cases(dtype, CUDA):
        count = len(launches)
        check(case, packed(case.x))
        assert len(launches) - count == case.is_reached, f"{case}: launched, or not"


@pytest.mark.parametrize("samples", [1, 3, 32, 128, 257])
def test_large_views(samples: int, launches: list[int]) -> None:
    """More tiles than the device takes at once, and a last one that is not full."""
    whole = torch.randint(-(1 << 31), 1 << 31, (samples, 197, 3 * 768), device=CUDA).to(torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        for part in whole.view(dtype).chunk(3, -1):
            check(Case("a third", part), packed(part))
            check(Case("some tokens of it", part[:, 1:]), packed(part[:, 1:]))
    assert len(launches) == 12


def test_views_that_reach_past_four_gigabytes(launches: list[int]) -> None:
    """Bytes are counted in 64 bits, though units are in 32."""
    whole = torch.empty(3 << 20, 2048, dtype=torch.uint8, device=CUDA)
    whole.view(torch.int64)[:, ::4] = torch.arange(3 << 20, device=CUDA).unsqueeze(1)
    part = whole[:, :1536]
    found = packed(part)
    assert launches and all(torch.equal(a, b) for a, b in zip(found.split(1 << 18), part.split(1 << 18), strict=True))


def test_captured_and_replayed() -> None:
    x = query(4)
    packed(x)  # compiled by now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = packed(x)
    for number in range(3):
        x.copy_(torch.randn_like(x) * (1 + number))
        graph.replay()
        check(Case(f"replay {number}", x), found)


def test_it_waits_for_nothing() -> None:
    x = query(4)
    packed(x)
    done = torch.cuda.Event()
    with no_waiting():
        torch.cuda._sleep(200_000_000)
        found = packed(x)
        done.record()
        assert not done.query(), "something waited"
    check(Case("behind a sleeping kernel", x), found)


def test_a_stream_of_ones_own() -> None:
    """The kernel runs on the stream that is current where it is launched."""
    x = query(4)
    expected = packed(x * 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.mul_(2)
        found = packed(x)
    stream.synchronize()
    assert torch.equal(found, expected)


def test_it_is_not_slower_than_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of 38 MB; prints how fast either is, reads and writes counted."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    x = query()
    clone_ms, packed_ms = _elapsed_ms(x.clone), _elapsed_ms(lambda: packed(x))
    for name, elapsed in (("clone", clone_ms), ("packed", packed_ms)):
        print(f"{name}: {x.nbytes / 1e6:.1f} MB in {elapsed * 1e3:.1f} us, {2 * x.nbytes / elapsed / 1e6:.0f} GB/s")
    assert packed_ms <= clone_ms


def _elapsed_ms(copy: Callable[[], Tensor], repeats: int = 20) -> float:
    """Of one copy on the device, the median of several replays of a graph: the host does not count."""
    copy()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            copy()
    spent = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / repeats)
    return median(spent)
