"""Values that a code cannot carry: their positions and the values themselves, restored bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.errors import PayloadError
from lowtide.records import Encoded


def gather(flat: Tensor, where: Tensor) -> dict[str, Tensor]:
    """Payload parts for the elements of ``flat`` that ``where`` marks; empty if there are none."""
    index = where.nonzero().squeeze(1)
    return parts(index, flat[index])


def parts(index: Tensor, value: Tensor) -> dict[str, Tensor]:
    if not index.numel():
        return {}
    return {"escape_index": index.to(_index_dtype(int(index[-1]))), "escape_value": value}


def scatter(flat: Tensor, encoded: Encoded) -> None:
    """Write the escaped values of a payload back into ``flat``."""
    if "escape_index" not in encoded.tensors:
        return
    index = encoded.tensors["escape_index"]
    value = encoded.tensor("escape_value", dtype=flat.dtype, numel=index.numel())
    if index.dtype not in (torch.int32, torch.int64):
        raise PayloadError(f"{encoded.codec} payload: escape positions are {index.dtype}: corrupted")
    flat[index.long()] = value


def _index_dtype(largest: int) -> torch.dtype:
    return torch.int32 if largest < 1 << 31 else torch.int64
