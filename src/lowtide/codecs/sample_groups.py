"""Min-max groups with more bits for the samples that need them: bits by sample, as in ActNN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowtide.codecs import Codec
from lowtide.codecs.groups import Groups
from lowtide.coding import bitpack, dither, layout
from lowtide.errors import DtypeError, PayloadError, PolicyError
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["SampleGroups"]


@dataclass(frozen=True, slots=True)
class SampleGroups:
    """|x' - x| <= scale of its group, as in codec ``groups``, which codes the samples: some with more bits than others.

    ``bits`` is their average: 3 means codes of 2 bits for half of the samples and of 4 bits for the other half, namely
    those with the largest sum of squared group ranges. The added variance of a weight gradient is proportional to that
    sum (ActNN), so no other choice of as many samples leads to less. How many get more bits depends on ``bits`` and
    their number alone, so that nobody waits for a GPU.

    A sample is an entry along the first axis; where that axis is not the outermost in memory, the tensor is one sample.
    NaN, inf, dtypes and layouts are those of ``groups``; a group may reach into the next sample with as many bits.
    """

    bits: float = 3.0
    group: int = 256
    rounding: str = "stochastic"

    name: ClassVar[str] = "sample_groups"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int | float) or not bitpack.WIDTHS[0] <= self.bits <= bitpack.WIDTHS[-1]:
            raise PolicyError(f"sample_groups has codes of 1 to 8 bits on average, got {self.bits!r}")
        self.coders()

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.coders()[0].accepts(dtype)

    def coders(self) -> tuple[Groups, Groups]:
        """For samples with few and with many bits: the widths next to the average."""
        return _coders(self.bits, self.group, self.rounding)

    def chosen(self, samples: int) -> int:
        """How many of the samples have many bits."""
        few, many = self.coders()
        return round(samples * (self.bits - few.bits) / (many.bits - few.bits)) if many.bits > few.bits else 0

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        return self.encode_by(self.coders(), x, seed)

    def encode_by(self, coders: Sequence[Codec], x: Tensor, seed: int) -> Encoded:
        """By these codecs, which may be twins."""
        if not self.accepts(x.dtype):
            raise DtypeError(f"sample_groups stores the dtypes of groups; got {x.dtype}")
        spec = layout.spec_of(x)
        rows = layout.memory_view(x).view(count_samples(spec), -1) if spec.numel else x.reshape(1, 0)
        mask = self.choose(rows)
        parts = {"mask": mask}
        for number, (name, index) in enumerate(self.split(mask).items()):
            coded = coders[number].encode(rows[index], seed=dither.mix64(number, state=seed))
            parts |= {f"{name}_{part}": tensor for part, tensor in coded.tensors.items()}
        return self.payload(spec, parts)

    def choose(self, rows: Tensor) -> Tensor:
        """A row for each sample; 1 for those that have many bits."""
        order = self._needs(rows).argsort(stable=True)
        few = order.numel() - self.chosen(order.numel())
        return torch.zeros(order.numel(), dtype=torch.uint8, device=rows.device).index_fill_(0, order[few:], 1)

    def split(self, mask: Tensor) -> dict[str, Tensor]:
        """Samples with few and with many bits, in order; however a mask was damaged, each sample is in one of them."""
        order, few = mask.argsort(stable=True), mask.numel() - self.chosen(mask.numel())
        return {"few": order[:few], "many": order[few:]}

    def payload(self, spec: TensorSpec, parts: dict[str, Tensor]) -> Encoded:
        meta: dict[str, Any] = {"bits": float(self.bits), "group": self.group}
        return Encoded(self.name, self.version, spec, meta, parts)

    def decode(self, encoded: Encoded) -> Tensor:
        writer = self.of_payload(encoded)
        return writer.decode_by(writer.coders(), encoded)

    @classmethod
    def of_payload(cls, encoded: Encoded) -> SampleGroups:
        """The codec that wrote a payload, but for its rounding, which decoding does not ask for."""
        encoded.require(cls.name, cls.version)
        try:
            return cls(encoded.meta["bits"], encoded.meta["group"])
        except (KeyError, PolicyError) as error:
            raise PayloadError(f"sample_groups payload: its options cannot be: {error}: corrupted") from error

    def decode_by(self, coders: Sequence[Codec], encoded: Encoded) -> Tensor:
        """A payload that this codec wrote."""
        spec = encoded.spec
        count, index_of = self.stored(encoded)
        rows = torch.empty((count, spec.numel // count), dtype=spec.dtype, device=spec.device)
        for number, (name, index) in enumerate(index_of.items()):
            part = TensorSpec((index.numel(), rows.shape[1]), (rows.shape[1], 1), spec.dtype, spec.device)
            rows[index] = coders[number].decode(self.part(encoded, number, name, part))
        return layout.restore(rows.view(-1), spec)

    def stored(self, encoded: Encoded) -> tuple[int, dict[str, Tensor]]:
        """How many samples a payload has, and which have few and many bits."""
        count = count_samples(encoded.spec)
        return count, self.split(encoded.tensor("mask", dtype=torch.uint8, numel=count))

    def part(self, encoded: Encoded, number: int, name: str, spec: TensorSpec) -> Encoded:
        """The payload of ``groups`` for the samples with few or with many bits."""
        prefix, writer = f"{name}_", self.coders()[number]
        tensors = {key.removeprefix(prefix): t for key, t in encoded.tensors.items() if key.startswith(prefix)}
        return Encoded(writer.name, writer.version, spec, {"bits": writer.bits, "group": writer.group}, tensors)

    def _needs(self, rows: Tensor) -> Tensor:
        """Of each sample, the sum of its squared group ranges; zero where it is not finite and comes back as NaN."""
        if not rows.numel():
            return torch.zeros(rows.shape[0], device=rows.device)
        missing = -rows.shape[1] % self.group
        if missing:
            rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], 1)
        low, high = torch.aminmax(rows.unflatten(1, (-1, self.group)), dim=2)
        need = (high.float() - low.float()).square_().sum(1)
        return torch.where(need.isfinite(), need, 0)


def count_samples(spec: TensorSpec) -> int:
    """Entries along the first axis, if it is the outermost in memory; else the tensor is one sample."""
    if len(spec.shape) < 2 or not spec.numel:
        return 1
    outermost = all(spec.stride[0] >= stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size > 1)
    return spec.shape[0] if outermost else 1


@cache
def _coders(bits: float, group: int, rounding: str) -> tuple[Groups, Groups]:
    few = max(width for width in bitpack.WIDTHS if width <= bits)
    many = min(width for width in bitpack.WIDTHS if width >= bits)
    return Groups(few, group, rounding), Groups(many, group, rounding)
