"""What equal means for payloads and values: the same bits, of NaN too, unless two kinds of NaN are said to be one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.records import Encoded

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bits of a dense tensor in memory order; a copy."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return flat.view(_INTEGERS[x.dtype.itemsize]).clone()


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """The same bits at the same strides and the same offset into their storage, so that alignment is kept too."""
    integers = _INTEGERS[x.dtype.itemsize]
    copy = torch.zeros(x.storage_offset() + x.numel(), dtype=integers, device=device)
    return copy.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x.view(integers)).view(x.dtype)


def assert_same_payload(got: Encoded, expected: Encoded, what: str) -> None:
    assert (got.codec, got.version) == (expected.codec, expected.version), what
    assert repr(got.meta) == repr(expected.meta), f"{what}: meta {got.meta}, not {expected.meta}"
    assert got.spec.shape == expected.spec.shape and got.spec.stride == expected.spec.stride, what
    assert got.tensors.keys() == expected.tensors.keys(), f"{what}: parts {list(got.tensors)}"
    for name, part in expected.tensors.items():
        found = got.tensors[name]
        assert found.dtype == part.dtype and found.shape == part.shape, (
            f"{what}: part {name} is {found.dtype} {tuple(found.shape)}, not {part.dtype} {tuple(part.shape)}"
        )
        unequal = (bits(found).to(part.device) != bits(part)).nonzero().flatten()
        assert not unequal.numel(), f"{what}: part {name} differs in {unequal.numel()}, first at {int(unequal[0])}"


def assert_same_values(got: Tensor, expected: Tensor, what: str, *, any_nan: bool = False) -> None:
    assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride()), what
    unequal = bits(got).to(expected.device) != bits(expected)
    if any_nan:
        both = got.to(expected.device).isnan() & expected.isnan()
        unequal &= ~both.as_strided((both.numel(),), (1,))
    if bool(unequal.any()):
        at = int(unequal.nonzero()[0])
        first = [float(t.as_strided((t.numel(),), (1,))[at]) for t in (got, expected)]
        raise AssertionError(f"{what}: {int(unequal.sum())} differ, first at {at}: {first[0]!r}, not {first[1]!r}")


def run_cases(cases: Iterable[Any], check: Callable[[Any, torch.device], object]) -> int:
    """Check all cases in the interpreter and say how many passed; gives the exit status."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before this script starts"
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN: an element not written shows
    passed = failed = 0
    for case in cases:
        try:
            check(case, torch.device("cpu"))
            passed += 1
        except Exception as error:
            failed += 1
            print(f"FAILED {case}", file=sys.stderr)
            traceback.print_exception(error, limit=-2)
    print(f"{passed} of {passed + failed} cases passed")
    return 1 if failed else 0
