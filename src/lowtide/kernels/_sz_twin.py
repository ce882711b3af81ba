"""What the twins of ``sz`` share: all that is decided before a tensor is coded, they leave to the codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lowtide.bounds import BoundSource
from lowtide.codecs.sz import Plan, Sz, require_zeros
from lowtide.coding import membership
from lowtide.coding.grid import Grid
from lowtide.records import Bound, Encoded, Need


@dataclass(frozen=True, slots=True)
class SzTwin:
    """The twin of one ``Sz``; what its kernels do not reach is left to the codec."""

    codec: Sz

    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def keep_zeros(self) -> bool:
        return self.codec.keep_zeros

    @property
    def learns(self) -> bool:
        return self.codec.learns

    def grid(self, x: Tensor, bound: Bound | None) -> Grid:
        return self.codec.grid(x, bound)

    def measure(self, x: Tensor, source: BoundSource, need: Need) -> tuple[Bound, Grid] | None:
        return self.codec.measure(x, source, need)

    def survey(self, x: Tensor, grid: Grid, **options: int) -> Tensor:
        return self.codec.survey(x, grid, **options)

    def fit(
        self, grid: Grid, sample: Tensor, count: int, zero_code: bool | None = None, before: Plan | None = None
    ) -> Plan:
        return self.codec.fit(grid, sample, count, zero_code, before)

    def plan(self, x: Tensor, bound: Bound | None, zero_code: bool | None = None) -> Plan:
        grid = self.grid(x, bound)
        return self.fit(grid, self.survey(x, grid).cpu(), x.numel(), zero_code)

    def codes(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, plan: Plan | None = None) -> Tensor:
        return self.codec.codes(x, bound, seed=seed, plan=plan if plan is not None else self.plan(x, bound))

    def decode(self, encoded: Encoded) -> Tensor:
        return self._decode(encoded, mask=False)

    def nonzero(self, encoded: Encoded) -> Tensor:
        if encoded.meta["kind"] != "empty":
            require_zeros(encoded)
        return self._decode(encoded, mask=True)

    def gate(self, encoded: Encoded, gradient: Tensor) -> Tensor:
        return membership.gated(gradient, self.nonzero(encoded))

    def _decode(self, encoded: Encoded, *, mask: bool) -> Tensor:
        raise NotImplementedError
