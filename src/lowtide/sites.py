"""What earlier steps have taught about each site: its bound, how its values are coded, how much room they need.

A bound that is a multiple of a statistic, and the model of an entropy coder, change slowly in training. They are
measured at the first save of a site, again at its saves number 1, 2, 4, 8, 16 and 32, then at every ``refresh``-th, the
sites taking turns (docs/dataflow.md, rule 14); a model, from then on, only if payloads have grown or shrunk, and at
once if they are far larger than it was made for. Between, a save costs one pass over the tensor and no statistics.
Bounds per row, or per channel of a sample, belong to the rows at hand and are measured at every save.

Nothing here waits for a GPU, except at the first save of a site: the codes of a sample travel to the host while the
step goes on, a thread fits a model to them and loads the kernels that the model needs, and the site's saves use it when
all that is there. Where a bound has moved by more than a fifth, or a model has turned out useless, the coder does
without one in the meantime. That changes sizes, never values.
"""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.background import Background
from lowtide.bounds import CONSTANT, BoundRule, BoundSource
from lowtide.codecs import Codec
from lowtide.errors import StateError
from lowtide.records import Bound, Need, Site, TensorSpec

_FIRST = (1, 2, 4, 8, 16, 32)  # saves at which a bound is measured, beside every so many
_EARLY = 33  # saves, after which a model that still does as well as it did is kept
_SETTLED = 8  # saves after a model was made, when payloads have the size that it gives
_DRIFT = 0.02
_STALE, _USELESS = (1.12, 0.06), (1.8, 0.5)  # times the bits that a model was made for, and bits beyond
_LEAP = 0.26  # bits between two bounds beyond which the model of one does not serve the other
_AT_REST = 3  # saves under the same bound
_FEW_PIECES = 192  # of a tensor, for a model that is waited for


class Survey:
    """Codes of a sample on their way to the host, then a plan that is being fitted to them in the background."""

    __slots__ = ("_arrived", "_codes", "_fitting")

    def __init__(self, codes: Tensor) -> None:
        self._codes, self._arrived = codes, None
        self._fitting: Future[Any] | None = None
        if codes.is_cuda:
            self._codes = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True)
            self._codes.copy_(codes, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(codes.device))

    @property
    def is_fitting(self) -> bool:
        return self._fitting is not None and not self._fitting.done()

    def fitted(self, codec: Any, memo: Memo, x: Tensor, *, replayed: bool = False) -> Any:
        """A plan for tensors like ``x`` once it can be used, None before; never waits.

        ``replayed``: in graphs, too.
        """
        if self._fitting is None and (self._arrived is None or self._arrived.query()):
            plan, zero_code, codes, spec = memo.plan, memo.zero_code, self._codes, TensorSpec.of(x)
            self._fitting = _WORKER.submit(lambda: _fit(codec, plan, zero_code, codes, spec, replayed=replayed))
        return self._fitting.result() if self._fitting is not None and self._fitting.done() else None

    def give_up(self) -> None:
        """The plan is not wanted any more: spare the fit, and what would be compiled for it, if it has not begun."""
        if self._fitting is not None:
            self._fitting.cancel()


def _fit(codec: Any, plan: Any, zero_code: bool | None, codes: Tensor, spec: TensorSpec, *, replayed: bool) -> Any:
    """The plan that follows ``plan``, with its kernels, and with those for the save at which its model is dropped."""
    fitted = codec.fit(plan.grid, codes, spec.numel, zero_code, plan)
    if hasattr(codec, "make_ready"):
        codec.make_ready(fitted, spec, replayed=replayed)
        codec.make_ready(dataclasses.replace(fitted, model=None), spec)
    return fitted


def _leap(before: BoundSource | str, after: BoundSource) -> float:
    """By how many bits a bound has become smaller, if the model of one does not serve the other; else 0."""
    parts = [getattr(source, "parts", ()) for source in (before, after)]  # of a tensor that is made of several
    if parts[0] and len(parts[0]) == len(parts[1]):
        return max((_leap(*pair) for pair in zip(*parts, strict=True)), key=abs)
    if not isinstance(before, BoundRule) or not isinstance(after, BoundRule) or before.unit != after.unit:
        return math.inf
    bits = math.log2(before.value / after.value)
    return bits if abs(bits) > _LEAP else 0.0


def _key(x: Tensor, site: Site, need: Need) -> tuple[str, str, str, tuple[int, ...]]:
    """Bounds of rows are measured at every save: what is known does not depend on how many there are."""
    axes = need.axes(x.dim())
    sizes = tuple([x.shape[axis] for axis in axes]) if axes and 0 not in axes else ()
    return site.name, str(x.dtype), need.per.value, sizes


def _is_constant(memo: Memo) -> bool:
    """Whether tensors have nothing to say about the bound: one number in its own unit, and no means to count from."""
    source = memo.source
    return isinstance(source, BoundRule) and source.unit in CONSTANT and not memo.bound.axes


def _measure(memo: Memo, x: Tensor, codec: Any, need: Need) -> tuple[Bound, Any]:
    """The bound for the tensor at hand, and its grid if the codec has worked out both at once."""
    assert not isinstance(memo.source, str), "a memo has its source once it was recalled"
    measured = codec.measure(x, memo.source, need) if hasattr(codec, "measure") else None
    return measured if measured is not None else (memo.source.resolve(x, need), None)


def _catch_up(model: Any, device: torch.device) -> None:
    """Tables are copied on the device's default stream; those who work on another one wait for that copy, and it for
    them before it has their memory for others."""
    if device.type == "cuda":
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if current != default:
            current.wait_stream(default)
            if model is not None:
                model.freqs.record_stream(current)


_WORKER = Background("lowtide")


@dataclass(slots=True)
class Memo:
    """What is known about the tensors of one site."""

    source: BoundSource | str  # in words where it comes from a checkpoint
    bound: Bound
    saves: int = 0
    plan: Any = None
    survey: Survey | None = None
    zero_code: bool | None = None
    rate: float = 0.0  # words a value of the last payload
    rated: Any = None  # the model that it was coded with
    usual: float = 0.0  # the same, some saves after the model was made
    fitted: int = 0  # the save at which that was
    regrid: bool = False  # the plan is one for another bound
    moved: bool = False  # the source of the bound is another than at the last save
    leap: float = 0.0  # and so much smaller, in bits, that the model no longer fits; or larger, where negative
    leapt: int = 0  # the save after which that happened last, 0: a model that fits has come since

    @property
    def is_complete(self) -> bool:
        """Whether earlier saves have left all that another one needs."""
        return self.plan is not None and not self.regrid and self.rate > 0

    @property
    def has_drifted(self) -> bool:
        """Whether payloads have become larger or smaller since the model was made: another may serve better."""
        return self.saves <= _EARLY or not self.usual or abs(self.rate - self.usual) > _DRIFT * self.usual

    def give_up_survey(self) -> None:
        if self.survey is not None:
            self.survey.give_up()
            self.survey = None

    def exceeds(self, limit: tuple[float, float]) -> bool:
        """Whether the last payload was larger than its model, which is still in use, was made for."""
        model = self.plan.model
        return model is not None and self.rated is model and 32 * self.rate > limit[0] * model.bits + limit[1]


class Sites:
    """The memos of a session."""

    def __init__(self, refresh: int, *, waits: bool = False) -> None:
        self.refresh = refresh
        self.due: bool | None = None  # whether bounds are measured at the next saves; None: when it is their turn
        self.replayed = False  # whether steps are captured in graphs, which have kernels of their own
        self._waits = waits  # for a model and for sizes where a bound has leapt, because bounds follow from sizes
        self._memos: dict[tuple[str, str, str, tuple[int, ...]], Memo] = {}
        self._not_two_valued: set[str] = set()

    def recall(self, x: Tensor, source: BoundSource, site: Site, need: Need) -> Memo:
        """The memo for tensors like ``x``, with a bound."""
        key = _key(x, site, need)
        memo = self._memos.get(key)
        if memo is None:
            memo = self._memos[key] = Memo(source, source.resolve(x, need))
        elif memo.source is not source:
            memo.moved = memo.source != (str(source) if isinstance(memo.source, str) else source)
            memo.leap = _leap(memo.source, source) if memo.moved else 0.0
            memo.source = source
        return memo

    def measure(self, x: Tensor, source: BoundSource, site: Site, need: Need) -> Memo:
        """The memo with a bound for another save of a tensor that is not coded by itself."""
        memo = self.recall(x, source, site, need)
        memo.regrid = memo.plan is not None  # where it has been coded by itself before
        self.prepare(memo, x, None, site, need)
        return memo

    def measured(self, x: Tensor, source: BoundSource, site: Site, need: Need) -> Memo | None:
        """The same if an earlier save has left one, under this very bound, and nothing is to be learnt."""
        memo = self._memos.get(_key(x, site, need))
        return memo if memo is not None and memo.saves and memo.source == source else None

    def known(self, x: Tensor, source: BoundSource, site: Site, need: Need) -> Memo | None:
        """The same if earlier saves have left all that another one needs, under this very bound."""
        memo = self._memos.get(_key(x, site, need))
        return memo if memo is not None and memo.is_complete and memo.source == source else None

    def as_known(self, memo: Memo, x: Tensor, codec: Any, need: Need) -> tuple[Bound, Any]:
        """Bound and plan for another save of which nothing is to be learnt; only bounds of rows are measured."""
        if 0 not in memo.bound.axes:
            return memo.bound, memo.plan
        bound, grid = _measure(memo, x, codec, need)
        return bound, memo.plan.on(grid if grid is not None else codec.grid(x, bound))

    def memos(self) -> list[Memo]:
        """All that is known, site by site."""
        return list(self._memos.values())

    @property
    def is_fitting(self) -> bool:
        """Whether models are on their way that will be used at their sites' next saves."""
        return any(memo.survey is not None and memo.survey.is_fitting for memo in self._memos.values())

    def wait(self) -> None:
        """Have all models fitted whose codes have arrived, and their kernels loaded."""
        _WORKER.submit(lambda: None).result()

    def prepare(self, memo: Memo, x: Tensor, codec: Codec | None, site: Site, need: Need) -> None:
        """Bring the bound up to date for another save of the site, and the plan if its codec makes plans."""
        due = self._is_due(site, memo.saves)
        moved = memo.moved or 0 in memo.bound.axes or (due and not _is_constant(memo))
        grid = None
        if moved and memo.saves:
            memo.bound, grid = _measure(memo, x, codec, need)
        elif memo.bound.value.device != x.device:  # from a checkpoint
            memo.bound = Bound(memo.bound.value.to(x.device), memo.bound.axes)
        memo.saves += 1
        if memo.saves == memo.fitted + _SETTLED:
            memo.usual = memo.rate
        if hasattr(codec, "plan"):
            self._plan(memo, codec, x, due=due or memo.moved, moved=moved, grid=grid)
        memo.moved = False

    def _plan(self, memo: Memo, codec: Any, x: Tensor, *, due: bool, moved: bool, grid: Any) -> None:
        if memo.plan is None or (codec.keep_zeros and not memo.plan.zero_code):
            memo.give_up_survey()  # its codes were to be coded without a code for zero
            memo.plan = codec.plan(x, memo.bound, memo.zero_code)
            memo.zero_code = memo.plan.zero_code  # from now on: what values depend on changes with the bound alone
            self._compile_ahead(memo.plan, codec, x)
            return
        if moved or memo.regrid:
            grid = grid if grid is not None else codec.grid(x, memo.bound)
            memo.plan, memo.regrid = memo.plan.on(grid), False
        if memo.leap:
            self._leap(memo, codec, x)
        elif memo.exceeds(_USELESS):
            memo.plan, memo.leapt = dataclasses.replace(memo.plan, model=None), memo.saves
            memo.give_up_survey()
        if memo.survey is not None:
            try:
                fitted = memo.survey.fitted(codec, memo, x, replayed=self.replayed)
            except BaseException:
                memo.survey = None  # told once; the site goes on with what it has
                raise
            if fitted is not None:
                _catch_up(fitted.model, x.device)
                memo.plan = dataclasses.replace(memo.plan, model=fitted.model)
                memo.survey = None
                memo.fitted, memo.usual, memo.leapt = memo.saves, 0.0, 0
        elif getattr(codec, "learns", True) and self._wants_model(memo, due):
            memo.survey = Survey(codec.survey(x, memo.plan.grid))

    def _leap(self, memo: Memo, codec: Any, x: Tensor) -> None:
        """Codes of another bound are other symbols: until they have been looked at, they go without a model."""
        model, leap = None, memo.leap
        memo.leap, memo.leapt = 0.0, memo.saves
        memo.give_up_survey()
        if self._waits and getattr(codec, "learns", True):
            sample = codec.survey(x, memo.plan.grid, pieces=_FEW_PIECES).cpu()
            model = codec.fit(memo.plan.grid, sample, x.numel(), memo.zero_code, memo.plan).model
            memo.fitted, memo.usual, memo.leapt = memo.saves, 0.0, 0
        memo.plan = dataclasses.replace(memo.plan, model=model)
        self._compile_ahead(memo.plan, codec, x)
        if self._waits or not math.isfinite(leap):
            memo.rate = 0.0
        elif memo.rate:
            memo.rate = 1.2 * memo.rate + (1 + max(leap, 0)) / 32

    def _compile_ahead(self, plan: Any, codec: Any, x: Tensor) -> None:
        """A plan that is used at once: its encoder is waited for, its decoders are compiled while forward goes on."""
        if hasattr(codec, "compile_ahead"):
            codec.compile_ahead(plan, TensorSpec.of(x), replayed=self.replayed)

    def _wants_model(self, memo: Memo, due: bool) -> bool:
        if memo.leapt:  # a bound that has just leapt may do so again
            return memo.saves - memo.leapt == _AT_REST or (due and not memo.moved)
        return memo.exceeds(_STALE) or (due and (memo.moved or memo.has_drifted))

    def may_be_mask(self, site: Site) -> bool:
        return site.name not in self._not_two_valued

    def is_no_mask(self, site: Site) -> None:
        """A site that once held other values is not looked at again."""
        self._not_two_valued.add(site.name)

    def _is_due(self, site: Site, saves: int) -> bool:
        if self.due is not None:
            return self.due
        if saves < self.refresh:
            return saves in _FIRST
        return (saves + site.digest) % self.refresh == 0

    def state_dict(self) -> list[dict[str, Any]]:
        """Bounds, and which sites have a code for zero: what values depend on."""
        return [
            {
                "site": [*key[:3], list(key[3])],
                "source": str(memo.source),
                "bound": memo.bound.value.cpu(),
                "axes": list(memo.bound.axes),
                "saves": memo.saves,
                "zero_code": memo.zero_code,
            }
            for key, memo in self._memos.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go back, or on, to what values depended on. Models of sites that are known here are kept: they are about
        sizes, and fitting them anew takes longer than some steps."""
        before, self._memos = self._memos, {}
        for item in state:
            if set(item) != {"site", "source", "bound", "axes", "saves", "zero_code"}:
                raise StateError(f"what is known about a site has other parts than expected: {sorted(item)}")
            name, dtype, per, sizes = item["site"]
            bound = Bound(item["bound"], tuple(item["axes"]))
            key = (name, dtype, per, tuple(sizes))
            memo = Memo(str(item["source"]), bound, int(item["saves"]), zero_code=item["zero_code"])
            known = before.get(key)
            if known is not None and known.plan is not None and known.zero_code == memo.zero_code:
                memo.plan, memo.regrid = known.plan, True
                memo.rate, memo.rated = known.rate, known.rated
            self._memos[key] = memo
