"""Tables of a graph, written anew: launches that were captured code by what was measured since, or nothing is touched.

The kernels run in the emulator; a replay is the launches of the capture, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from simt import requires_compiler
from test_kernel_sz_cuda import emulated
from torch import Tensor

from lowtide.bounds import BoundRule
from lowtide.codecs.sz import Plan, Sz
from lowtide.coding import rans_fit
from lowtide.graphs.recording import Recording
from lowtide.graphs.rooms import Rooms
from lowtide.graphs.tables import Tables
from lowtide.kernels import _sz_cuda
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.kernels._workspaces import Cell
from lowtide.records import Bound, Encoded
from lowtide.sites import Memo

SEED = 9
CHANNELS, ROWS, TENSOR = (1,), (0,), ()
CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "size": lambda plan: with_alphabet(plan, size=plan.model.alphabet.size - 1),
    "low": lambda plan: with_alphabet(plan, low=plan.model.alphabet.low + 1),
    "fill": lambda plan: with_alphabet(plan, fill=plan.model.alphabet.fill - 1),
    "rows": lambda plan: with_alphabet(plan, rows=plan.model.alphabet.rows + 12),
    "predicted": lambda plan: with_alphabet(plan, predicted=True),
    "bits": lambda plan: replace(plan, model=replace(plan.model, bits=1.2 * plan.model.bits)),
    "no model": lambda plan: replace(plan, model=None),
    "zero code": lambda plan: replace(plan, zero_code=True),
    "axes": lambda plan: replace(plan, grid=replace(plan.grid, axes=(0, 1))),
    "rounding": lambda plan: replace(plan, grid=replace(plan.grid, rounding="nearest")),
    "centre": lambda plan: replace(plan, grid=replace(plan.grid, centre=None)),
    "channels": lambda plan: replace(plan, grid=replace(plan.grid, step=plan.grid.step[:-1])),
}


def with_alphabet(plan: Plan, **change: int) -> Plan:
    assert plan.model is not None
    return replace(plan, model=replace(plan.model, alphabet=replace(plan.model.alphabet, **change)))


def bound_of(value: float, axes: tuple[int, ...], x: Tensor) -> Bound:
    return Bound.absolute(torch.full([x.shape[axis] for axis in axes], value), axes)


@dataclass
class Site:
    """A site of which all is known, and a graph with one payload of it: encoded, then decoded."""

    coder: str = "rans"
    axes: tuple[int, ...] = CHANNELS
    slack: float = 0.125
    dtype: torch.dtype = torch.float32
    launches: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.codec = SzCuda(Sz(coder=self.coder))
        self.x = torch.randn(96, 64) + torch.linspace(-3, 3, 64)
        if self.dtype is not torch.float32:
            self.x[:4] *= 20  # codes so large keep no promise by construction: each is compared with it
            self.x = self.x.to(self.dtype)
        bound = bound_of(0.3, self.axes, self.x)
        self.memo = Memo(BoundRule.parse("0.3"), bound, plan=self.codec.codec.plan(self.x, bound), rate=0.2)
        self.memo.zero_code = self.memo.plan.zero_code
        assert (self.memo.plan.model is None) == (self.coder == "blocks")
        self.cell, self.rooms = Cell(torch.device("cpu")), Rooms(self.slack)

    def capture(self, monkeypatch: pytest.MonkeyPatch) -> Recording:
        """With launches that are written down, and can be repeated."""
        monkeypatch.setattr(_sz_cuda, "_function", self._function)
        self.rooms.begin()
        recording = Recording(self.cell, self.rooms, is_capturing=True, tables=Tables([self.memo]))
        plan = self.memo.plan
        self.encoded: Encoded = recording.encode_bounded(
            self.x, self.codec, "a", SEED, self.memo, self.memo.bound, plan
        )
        self.decoded = self.codec.decode(self.encoded)
        monkeypatch.setattr(_sz_cuda, "_function", emulated)
        return recording

    def _function(self, *args: Any, **options: Any) -> Any:
        function, launches = emulated(*args, **options), self.launches

        class Written:
            def launch(self, *arguments: Any) -> None:
                launches.append(lambda: function.launch(*arguments))
                function.launch(*arguments)

        return Written()

    def replay(self) -> Tensor:
        self.decoded.fill_(torch.nan)
        for launch in self.launches:
            launch()
        return self.decoded.clone()

    def eager(self) -> Tensor:
        return self.codec.decode(self.codec.encode(self.x, seed=SEED, plan=self.memo.plan))

    def learn(self, factor: float = 1.25) -> None:
        """Values and bounds grow, and with them what is measured."""
        self.x.mul_(factor)
        self.memo.bound = bound_of(0.3 * factor, self.axes, self.x)
        grid = self.codec.grid(self.x, self.memo.bound)
        sample = self.codec.survey(self.x, grid)
        self.memo.plan = self.codec.codec.fit(grid, sample, self.x.numel(), self.memo.zero_code, self.memo.plan)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sz_cuda, "_function", emulated)
    monkeypatch.setattr(_sz_cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: 1)


@requires_compiler
@pytest.mark.parametrize(
    ("dtype", "axes"),
    [(torch.float32, TENSOR), (torch.float32, CHANNELS), (torch.bfloat16, CHANNELS)],
    ids=["tensor", "channels", "bf16"],
)
@pytest.mark.parametrize("coder", ["rans", "blocks"])
def test_the_next_replay_codes_as_an_eager_step_does_by_now(
    coder: str, dtype: torch.dtype, axes: Any, monkeypatch: pytest.MonkeyPatch
):
    site = Site(coder, axes, dtype=dtype)
    recording = site.capture(monkeypatch)
    captured = site.memo.plan
    assert torch.equal(site.replay(), site.eager())
    site.learn()
    assert site.memo.plan.grid.step is not captured.grid.step
    old = site.replay()
    assert not torch.equal(old, site.eager()), "by the tables of the capture"
    grid = captured.grid
    tables = [table for table in (grid.step, grid.inverse, grid.promised, grid.centre) if table is not None]
    expected = [table.clone() for table in tables]
    assert recording.renew([site.memo])
    assert torch.equal(site.replay(), site.eager())
    assert float((site.decoded - site.x).abs().max()) > 0.3, "within the new bound, not the old one"
    for table, before in zip(tables, expected, strict=True):
        assert torch.equal(table, before), "what others may hold is as it was"
    recording.begin_replay()
    site.replay()
    assert recording.look() == []


@requires_compiler
def test_shares_of_symbols_are_renewed_too(monkeypatch: pytest.MonkeyPatch):
    """They change sizes only: what is decoded by other shares than encoded would be noise."""
    site = Site()
    recording = site.capture(monkeypatch)
    site.replay()
    wide = recording._gauges[0].ticket.status
    site.x.mul_(0.5)
    recording.begin_replay()
    site.replay()
    unfit = recording._gauges[0].ticket.status
    alphabet = site.memo.plan.model.alphabet
    sample = rans_fit.Sample(site.codec.survey(site.x, site.memo.plan.grid), zero_code=False)
    site.memo.plan = replace(site.memo.plan, model=sample.model(alphabet))
    assert recording.renew([site.memo])
    recording.begin_replay()
    assert torch.equal(site.replay(), site.eager())
    assert recording._gauges[0].ticket.status < 0.95 * unfit <= wide


@requires_compiler
def test_rows_bring_their_own_bounds(monkeypatch: pytest.MonkeyPatch):
    """Their grid is made inside of the graph; only the shares of symbols are the graph's."""
    site = Site(axes=ROWS)
    tables = Tables([site.memo])
    here = site.memo.plan.on(site.codec.grid(site.x, bound_of(0.2, ROWS, site.x)))
    own = tables.plan(site.memo, here)
    assert own.grid is here.grid and own.model.freqs is not site.memo.plan.model.freqs
    site.memo.plan = replace(here, model=replace(here.model, freqs=here.model.freqs.flip(0)))
    assert tables.renew([site.memo])
    assert torch.equal(own.model.freqs, here.model.freqs.flip(0))


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_baked_into_launches_takes_another_graph(change: str):
    site = Site()
    tables = Tables([site.memo])
    own = tables.plan(site.memo, site.memo.plan)
    before = [table.clone() for table in (own.grid.step, own.grid.inverse, own.model.freqs)]
    site.learn()
    plan = site.memo.plan
    for _ in range(2):
        site.memo.plan = CHANGES[change](plan)
        assert not tables.renew([site.memo])
        for table, value in zip((own.grid.step, own.grid.inverse, own.model.freqs), before, strict=True):
            assert torch.equal(table, value), "all or nothing"
    site.memo.plan = plan
    assert tables.renew([site.memo]) and torch.equal(own.grid.step, plan.grid.step)


def test_sites_that_have_come_or_gone_take_another_graph():
    one, other = Site(), Site()
    tables = Tables([one.memo])
    tables.plan(one.memo, one.memo.plan)
    assert tables.renew([one.memo])
    assert not tables.renew([]), "forgotten, as by a state that was loaded"
    assert not tables.renew([one.memo, other.memo]), "a graph that is captured now would compress it"
    other.memo.rate = 0.0
    assert tables.renew([one.memo, other.memo]), "and now it would not"
    one.memo.regrid = True
    assert not tables.renew([one.memo])


def test_tables_are_copied_in_lists_of_one_dtype(monkeypatch: pytest.MonkeyPatch):
    """Or each would be a launch of its own."""
    sites = [Site() for _ in range(3)]
    tables = Tables([site.memo for site in sites])
    for site in sites:
        tables.plan(site.memo, site.memo.plan)
    lists, copy = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: lists.append({x.dtype for x in to}) or copy(to, of))
    assert tables.renew([site.memo for site in sites])
    assert sorted(map(str, lists)) == ["{torch.bfloat16}", "{torch.float32}", "{torch.int16}"]


@requires_compiler
def test_payloads_that_have_outgrown_their_rooms_take_another_graph(monkeypatch: pytest.MonkeyPatch):
    site = Site(slack=0.25)
    site.memo.rate = 10.0
    recording = site.capture(monkeypatch)
    site.rooms.begin()
    assert recording.renew([site.memo])
    site.memo.rate = 11.0
    assert recording.renew([site.memo]), "half the slack is left: 11 * 1.125 words a value, of 12.5"
    site.memo.rate = 11.5
    assert not recording.renew([site.memo])
    site.memo.rate = 10.0
    site.rooms.of("a").note(11.5)
    site.rooms.begin()
    assert not recording.renew([site.memo]), "what a replay has needed counts as well"


@requires_compiler
def test_rooms_that_are_far_too_large_take_another_graph(monkeypatch: pytest.MonkeyPatch):
    site = Site(slack=0.25)
    site.memo.rate = 10.0
    recording = site.capture(monkeypatch)
    assert not recording.is_wasteful()
    site.rooms.of("a").slack = 0.23
    assert not recording.is_wasteful(), "a capture costs more than that is worth"
    site.rooms.of("a").slack = 0.125
    assert recording.is_wasteful()
    site.memo.rate = 11.5
    assert not recording.is_wasteful()
