"""The twin of ``division`` in CUDA C++ under the emulator: the codec's bytes and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from division_cases import BITS, DTYPES, Case, check, make_cases, make_tile_cases
from replay_cases import check as check_replays
from replay_cases import make_cases as make_replay_cases
from same_payload import assert_same_values
from simt import Emulated, requires_compiler

pytest.importorskip("triton")

from lowtide.codecs import division as codec_module
from lowtide.codecs.division import Division
from lowtide.errors import PayloadError
from lowtide.kernels import _division_cuda
from lowtide.kernels._division_cuda import DivisionCuda, job_of
from lowtide.records import Encoded, TensorSpec

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plain:
    """Stands in for the twin in Triton, which does not run here; counts what it is given."""

    codec: Division
    given = 0

    def encode(self, x: torch.Tensor, bound: Any = None, *, seed: int = 0, replay: Any = None) -> Encoded:
        type(self).given += 1
        return self.codec.encode(x, bound, seed=seed)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        return self.codec.decode(encoded)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch, emulate: Callable[..., Any]) -> None:
    guarded = emulate(_division_cuda, _emulated)
    monkeypatch.setattr(codec_module, "torch", guarded)  # makes room for payloads
    monkeypatch.setattr(_division_cuda, "DivisionKernel", Plain)
    monkeypatch.setattr(Plain, "given", 0)


def _emulated(kernel: str, device: int) -> Any:
    return Emulated(_division_cuda.PROGRAM).function(kernel)


@requires_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_equals_codec(dtype: str) -> None:
    """channels_last, a permuted layout, an empty tensor and what was published go to the other twin."""
    cases = [*make_cases(DTYPES[dtype]), *make_tile_cases(DTYPES[dtype])]
    for case in cases:
        check(case, CPU, kind=DivisionCuda)
    assert Plain.given == sum(job_of(TensorSpec.of(case.x), case.codec) is None for case in cases)
    assert len(cases) - Plain.given >= (40 if dtype == "fp32" else 8)


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("bits", BITS)
def test_every_width_in_tiles_of_several_planes(bits: int) -> None:
    for shape in ((3, 50, 7, 7), (2, 7, 16, 16)):
        check(Case("width", torch.randn(shape), Division(bits)), CPU, kind=DivisionCuda)


@requires_compiler
def test_replays_draw_anew() -> None:
    """For the number 0 as ever, for others as the codec with keys that are shifted by it."""
    cases = [case for case in make_replay_cases() if case[0].name == "division" and case[1].is_contiguous()]
    assert cases
    for case in cases:
        check_replays(case, CPU, kind=DivisionCuda)


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 5, 7, 7)], ids=str)
def test_bytes_of_a_payload_may_lie_anywhere(shape: tuple[int, ...]) -> None:
    """A store may put parts together: only wider numbers are where they can be read at once."""
    twin, x = DivisionCuda(Division()), torch.randn(shape)
    encoded = twin.encode(x)
    codes = torch.cat([encoded.tensors["codes"].new_zeros(1), encoded.tensors["codes"]])[1:]
    moved = replace(encoded, tensors={**encoded.tensors, "codes": codes})
    assert codes.data_ptr() % 2
    assert_same_values(twin.decode(moved), twin.decode(encoded), str(shape))


@requires_compiler
@pytest.mark.parametrize("part", ["mean", "low", "scale", "codes"])
def test_a_part_of_another_size_is_refused(part: str) -> None:
    twin = DivisionCuda(Division())
    encoded = twin.encode(torch.randn(2, 3, 8, 8))
    shorter = {**encoded.tensors, part: encoded.tensors[part][:-1]}
    with pytest.raises(PayloadError, match="truncated or corrupted"):
        twin.decode(replace(encoded, tensors=shorter))
