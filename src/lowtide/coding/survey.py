"""Codes of a sample, to fit a model to: what ``Grid.quantise`` gives, in as few launches as can be.

A survey is made in the middle of a step, and on a GPU the host's time for its launches is what it costs. It is about
shares of symbols, so it works in float32 throughout and takes its dither from a fixed row of bytes, made once for each
stream; codes differ from those of an encoder no more than those of two seeds do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lowtide.coding import dither, layout
from lowtide.coding.grid import MAX_CODE, Grid, reach
from lowtide.coding.rans import ROW, ZERO_CODE
from lowtide.coding.rans_fit import PIECE
from lowtide.records import TensorSpec

PIECES = 768  # of a sample
_FEWEST = 4


def survey(flat: Tensor, spec: TensorSpec, grid: Grid, *, pieces: int = PIECES) -> Tensor:
    """int16 on the device of ``flat``, the elements of a tensor in memory order; ``ZERO_CODE`` for exact zeros.

    Evenly spaced pieces; a tensor that is shorter than a few of them is repeated, so that all its values count alike.
    """
    count = flat.numel()
    if not count:
        return torch.zeros(0, dtype=torch.int16, device=flat.device)
    pieces = min(pieces, count // PIECE)
    stride = count // pieces // ROW * ROW if pieces else 0
    if pieces < _FEWEST:
        pieces, stride = _FEWEST, PIECE
        flat = flat.repeat(-(-_FEWEST * PIECE // count))
    x = flat.as_strided((pieces, PIECE), (stride, 1))
    terms = layout.index_terms(spec, grid.axes)
    if not terms:
        return _codes(x, grid, lambda table: table)
    start = torch.arange(0, pieces * stride, stride, device=x.device)
    index = start.unsqueeze(1) + torch.arange(PIECE, device=x.device)
    entries = layout.entries_at(terms, index).flatten()
    return _codes(x, grid, lambda table: table.index_select(0, entries).view(pieces, PIECE))


def _codes(x: Tensor, grid: Grid, pick: Callable[[Tensor], Tensor]) -> Tensor:
    assert grid.inverse is not None and grid.promised is not None, "a decoder's grid does not encode"
    ahead, back = (offsets[: len(x)] for offsets in _offsets(grid.rounding, x.device))
    wide = x.float()
    q = torch.addcmul(ahead, wide, pick(grid.inverse / 256)).floor_()
    kept = q.abs() <= MAX_CODE
    if 0 <= reach(x.dtype) < MAX_CODE:  # beyond it some are stored exactly; in wider dtypes next to none are
        value = (q + back).mul_(pick(grid.step)).to(x.dtype)
        kept &= torch.sub(value, wide).abs_() <= pick(grid.promised)
    if grid.centre is not None:
        q -= pick(grid.centre)
    q = torch.where(kept, q, 0.0)
    return torch.where(wide == 0, float(ZERO_CODE), q).to(torch.int16).flatten()


def _offsets(rounding: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Those of the current stream: another one could read them before they are there."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _make_offsets(rounding, device, stream)


@lru_cache(maxsize=16)
def _make_offsets(rounding: str, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """In steps, for each value of a sample: what is added before it is rounded down, and to its code afterwards.

    The half unit makes rounding to whole units, as in ``lowtide.coding.grid``, and then down to a code one rounding.
    """
    if rounding == "nearest":
        return torch.full((1, 1), 128.5 / 256, device=device), torch.zeros((1, 1), device=device)
    byte = dither.bytes_between(0, 0, PIECES * PIECE, device).view(PIECES, PIECE).float()
    back = (127.5 - byte) / 256 if rounding == "dither" else torch.zeros((1, 1), device=device)
    return (byte + 0.5) / 256, back
