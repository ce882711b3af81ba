"""Values that a code cannot carry: their positions and the values themselves, restored bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.errors import PayloadError
from lowtide.records import Encoded

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather(flat: Tensor, where: Tensor) -> dict[str, Tensor]:
    """Payload parts for the elements of ``flat`` that ``where`` marks."""
    index = where.nonzero().squeeze(1)
    return {"escape_index": index, "escape_value": flat[index]}


def none(flat: Tensor) -> dict[str, Tensor]:
    """The same where it is known that nothing is marked."""
    return {"escape_index": flat.new_empty(0, dtype=torch.int64), "escape_value": flat.new_empty(0)}


def scatter(flat: Tensor, encoded: Encoded, *, checked: bool = True) -> None:
    """Write the escaped values of a payload back into ``flat``.

    Unless ``checked``, it is left to the device to refuse positions outside, which has nobody wait for it.
    """
    index = encoded.tensor("escape_index", dtype=torch.int64)
    value = encoded.tensor("escape_value", dtype=flat.dtype, numel=index.numel())
    if index.numel():
        if checked and (int(index.amin()) < 0 or int(index.amax()) >= flat.numel()):
            raise PayloadError(f"{encoded.codec} payload: an escape lies outside the tensor: corrupted")
        # As integers: writing floats by index may pass them through another float type, which not every NaN survives.
        bits = _INTEGERS[flat.dtype.itemsize]
        flat.view(bits)[index] = value.view(bits)
