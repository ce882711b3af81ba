"""Twins of codecs that leave the coding of groups to codec ``groups``: the twin of that one does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowtide.codecs.norm_groups import NormGroups
from lowtide.codecs.sample_groups import SampleGroups
from lowtide.kernels import twin
from lowtide.kernels._base import Twin
from lowtide.kernels._workspaces import Replay
from lowtide.kernels.groups import DTYPES, fits
from lowtide.records import Bound, Encoded


@dataclass(frozen=True, slots=True)
class ComposedKernel(Twin):
    """What the codec does around its groups is a few ops of torch, which wait for nothing."""

    codec: NormGroups | SampleGroups

    takes_replay: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    @property
    def replays(self) -> bool:
        """Where the twin of ``groups`` does."""
        return fits(self.codec.group)

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, replay: Replay | None = None) -> Encoded:
        coders: list[Any] = [twin(codec, x.device, x.dtype) for codec in self.codec.coders()]
        if replay is not None:
            coders = [_Replayed(coder, replay) for coder in coders]
        return self.codec.encode_by(coders, x, seed)

    def decode(self, encoded: Encoded) -> Tensor:
        writer = self.codec.of_payload(encoded)
        coders = [twin(codec, encoded.spec.device, encoded.spec.dtype) for codec in writer.coders()]
        return writer.decode_by(coders, encoded)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A twin with the replay that a codec, which knows nothing of graphs, does not hand on."""

    coder: Any
    replay: Replay

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        encoded: Encoded = self.coder.encode(x, bound, seed=seed, replay=self.replay)
        return encoded
