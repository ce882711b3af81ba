"""Twin of the codec ``sample_groups``: samples are chosen by torch, groups coded by the twin of ``groups``."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.kernels._composed import ComposedKernel

__all__ = ["SampleGroupsKernel"]


@dataclass(frozen=True, slots=True)
class SampleGroupsKernel(ComposedKernel):
    """The bytes and values of ``lowtide.codecs.sample_groups``."""
