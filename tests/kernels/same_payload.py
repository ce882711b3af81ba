"""What equal means for payloads and values: the same bits, of NaN too, unless two kinds of NaN are said to be one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.coding import exact, rans
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


def in_order(encoded: Encoded) -> dict[str, Tensor]:
    """The parts of a payload; of rans with its chunks in the order of the tensor, as they may lie in any."""
    parts = dict(encoded.tensors)
    if "heads" not in parts or not parts["heads"].numel():
        return parts
    heads = parts["heads"].view(-1, 3).clone()
    dtype, alphabet = encoded.spec.dtype, encoded.meta["alphabet"]
    raw = exact.raw_counts(dtype, encoded.spec.numel, alphabet["rows"] * rans.ROW, heads.device)
    lengths, codes, lost = heads[:, 1], heads[:, 2] & 0xFFFF, heads[:, 2] >> 16 & 0xFFFF
    counts = rans.LANES + (lengths + 1) // 2 + codes + lost * exact.escape_words(dtype)
    counts = torch.where(lengths < 0, raw, counts)
    words = [
        parts["words"][start : start + count]
        for start, count in zip(heads[:, 0].tolist(), counts.tolist(), strict=True)
    ]
    heads[:, 0] = counts.cumsum(0) - counts
    return {**parts, "heads": heads.flatten(), "words": torch.cat(words)}


def assert_same_payload(got: Encoded, expected: Encoded, what: str) -> None:
    assert (got.codec, got.version) == (expected.codec, expected.version), what
    assert repr(got.meta) == repr(expected.meta), f"{what}: meta {got.meta}, not {expected.meta}"
    assert got.spec.shape == expected.spec.shape and got.spec.stride == expected.spec.stride, what
    assert got.tensors.keys() == expected.tensors.keys(), f"{what}: parts {list(got.tensors)}"
    for name, part in expected.tensors.items():  # as they are: to put chunks in order drops what lies behind them
        found = got.tensors[name]
        assert found.dtype == part.dtype and found.shape == part.shape, (
            f"{what}: part {name} is {found.dtype} {tuple(found.shape)}, not {part.dtype} {tuple(part.shape)}"
        )
    found_parts = in_order(got)
    for name, part in in_order(expected).items():
        found = found_parts[name]
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
