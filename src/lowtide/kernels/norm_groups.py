"""Twin of the codec ``norm_groups``: channels and rows by torch, groups by the twin of ``groups``."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.kernels._composed import ComposedKernel

__all__ = ["NormGroupsKernel"]


@dataclass(frozen=True, slots=True)
class NormGroupsKernel(ComposedKernel):
    """The bytes and values of ``lowtide.codecs.norm_groups``."""
