"""Twins of codecs that leave the coding of groups to codec ``groups``: the twin of that one does it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.codecs.norm_groups import NormGroups
from lowtide.codecs.sample_groups import SampleGroups
from lowtide.kernels import twin
from lowtide.kernels._base import Twin
from lowtide.records import Bound, Encoded


@dataclass(frozen=True, slots=True)
class ComposedKernel(Twin):
    """What the codec does around its groups is a few ops of torch, which wait for nothing."""

    codec: NormGroups | SampleGroups

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.codec.accepts(dtype)

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        coders = [twin(codec, x.device, x.dtype) for codec in self.codec.coders()]
        return self.codec.encode_by(coders, x, seed)

    def decode(self, encoded: Encoded) -> Tensor:
        writer = self.codec.of_payload(encoded)
        coders = [twin(codec, encoded.spec.device, encoded.spec.dtype) for codec in writer.coders()]
        return writer.decode_by(coders, encoded)
