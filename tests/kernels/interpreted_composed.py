"""Compare the twins of ``norm_groups`` and ``sample_groups`` with their codecs in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 python tests/kernels/interpreted_composed.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from same_payload import assert_same_payload, assert_same_values, run_cases
from torch import Tensor

from lowtide import kernels
from lowtide.codecs import Codec, create

Case = tuple[Codec, Tensor]


def make_cases() -> Iterator[Case]:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(6, 8, 5, 7).to(dtype)
        yield create("norm_groups", bits=2), x.contiguous(memory_format=torch.channels_last)
        yield create("norm_groups", bits=3.0), x
        yield create("norm_groups", bits=4, per="row"), x.flatten(0, 1).flatten(1)
        yield create("norm_groups", bits=4, per="row"), torch.randn(3, 300).to(dtype)
        yield create("sample_groups", bits=1.5), x
        whole = torch.randn(6, 8, 8, 8).to(dtype) * torch.rand(6, 1, 1, 1).to(dtype)
        whole[2, 0, 0, 0] = torch.nan
        for bits in (1.5, 2, 2.9, 7.99):  # samples that are whole groups; of one width in the second and the last
            yield create("sample_groups", bits=bits), whole
        yield create("sample_groups", bits=3, group=64), whole.contiguous(memory_format=torch.channels_last)
        yield create("norm_groups", bits=3.0), whole


def check(case: Case, device: torch.device) -> None:
    codec, x = case
    twin = kernels.twin(codec, device, x.dtype)
    assert type(twin).__name__ in ("NormGroupsKernel", "SampleGroupsKernel"), twin
    payload = codec.encode(x, seed=5)
    assert_same_payload(twin.encode(x, seed=5), payload, str(codec))
    assert_same_values(twin.decode(payload), codec.decode(payload), str(codec), any_nan=True)


if __name__ == "__main__":
    sys.exit(run_cases(make_cases(), check))
