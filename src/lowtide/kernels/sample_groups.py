"""Twin of the codec ``sample_groups``: torch chooses the samples, the twin of ``groups`` codes them where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.codecs.sample_groups import SampleGroups, count_samples
from lowtide.coding import dither, layout
from lowtide.kernels._composed import ComposedKernel
from lowtide.kernels._workspaces import Replay
from lowtide.kernels.groups import GroupsKernel
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["SampleGroupsKernel"]


@dataclass(frozen=True, slots=True)
class SampleGroupsKernel(ComposedKernel):
    """The bytes and values of ``lowtide.codecs.sample_groups``. Samples that are no whole groups are gathered first."""

    codec: SampleGroups

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, replay: Replay | None = None) -> Encoded:
        spec, codec = layout.spec_of(x), self.codec
        if not _reaches(codec, spec):
            return ComposedKernel.encode(self, x, bound, seed=seed, replay=replay)
        rows = layout.memory_view(x).view(count_samples(spec), -1)
        mask = codec.choose(rows)
        parts = {"mask": mask}
        for number, (name, index) in enumerate(codec.split(mask).items()):
            coder = GroupsKernel(codec.coders()[number])
            stored = coder.encode_rows(rows, index, seed=dither.mix64(number, state=seed), replay=replay)
            parts |= {f"{name}_{part}": tensor for part, tensor in stored.items()}
        return codec.payload(spec, parts)

    def decode(self, encoded: Encoded) -> Tensor:
        spec, writer = encoded.spec, self.codec.of_payload(encoded)
        if not _reaches(writer, spec):
            return ComposedKernel.decode(self, encoded)
        count, index_of = writer.stored(encoded)
        rows = torch.empty((count, spec.numel // count), dtype=spec.dtype, device=spec.device)
        for number, (name, index) in enumerate(index_of.items()):
            part = TensorSpec((index.numel(), rows.shape[1]), (rows.shape[1], 1), spec.dtype, spec.device)
            GroupsKernel(writer.coders()[number]).decode_rows(writer.part(encoded, number, name, part), rows, index)
        return layout.restore(rows.view(-1), spec)


def _reaches(codec: SampleGroups, spec: TensorSpec) -> bool:
    """Whether samples are whole groups, of a size and a dtype that the kernels take."""
    row = spec.numel // count_samples(spec)
    return all(GroupsKernel(coder).reaches(spec.dtype, spec.numel, row) for coder in codec.coders())
