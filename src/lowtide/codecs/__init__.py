"""One file a codec, in plain torch: it runs on any device and is the specification of its format."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.records import Bound, Encoded
from lowtide.registry import CODECS


class Codec(Protocol):
    """What every codec does. A codec is a frozen dataclass of its options and keeps no state.

    ``encode`` and ``decode`` are pure: the same input, bound and seed give the same bytes, and decoding twice gives the
    same values. ``encode`` takes a dense tensor (any strides) and neither changes nor keeps it.
    """

    @property
    def name(self) -> str: ...

    @property
    def carries_values(self) -> bool:
        """Whether the values themselves come back, and not only their shape, class or place in a window."""
        ...

    @property
    def takes_bound(self) -> bool:
        """Whether ``encode`` needs a bound and keeps it."""
        ...

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded."""
        ...

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        """The payload that stands for ``x``."""
        ...

    def decode(self, encoded: Encoded) -> Tensor:
        """A new tensor with the shape, strides, dtype and device of the one that was encoded."""
        ...


def create(name: str, **options: Any) -> Codec:
    """A codec by its name, with its options."""
    codec: Codec = CODECS.create(name, **options)
    return codec


def decode(encoded: Encoded) -> Tensor:
    """Decode a payload by the codec that it names; payloads describe themselves, so default options serve."""
    return create(encoded.codec).decode(encoded)
