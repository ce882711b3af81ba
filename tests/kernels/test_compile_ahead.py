"""Kernels that a new model needs are compiled and loaded behind the step, before the model is used."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.background import Once
from lowtide.bounds import BoundRule
from lowtide.codecs.sz import Plan, Sz
from lowtide.errors import LowtideError
from lowtide.kernels import _nvrtc, _sz_cuda, _sz_functions
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.kernels._workspaces import Cell, Replay
from lowtide.records import Bound, Kind, Need, Site, TensorSpec
from lowtide.sites import _WORKER, Memo, Sites

NEED, SITE, RULE = Need(Kind.VALUES, ""), Site("layer", "conv", "input"), BoundRule.parse("0.5")
SMALL, LARGE = torch.randn(1 << 15).relu(), 12 * torch.randn(1 << 15).relu()  # codes of one digit, and of two


class OnGpu(SzCuda):
    """Has tensors of the CPU taken for those of a GPU."""

    __slots__ = ()

    def compile_ahead(self, plan: Plan, spec: TensorSpec, **options: Any) -> list[Future[None]]:
        return SzCuda.compile_ahead(self, plan, replace(spec, device=torch.device("cuda", 0)), **options)

    def make_ready(self, plan: Plan, spec: TensorSpec, **options: Any) -> None:
        SzCuda.make_ready(self, plan, replace(spec, device=torch.device("cuda", 0)), **options)


CODEC = OnGpu(Sz(coder="rans", keep_zeros=True))


@dataclass
class Compiler:
    """Takes down which thread compiled what, and which loaded what; may be held up, or fail."""

    compiled: list[tuple[str, str]] = field(default_factory=list)
    loaded: list[tuple[str, str]] = field(default_factory=list)
    may_go_on: threading.Event = field(default_factory=threading.Event)
    fails: bool = False

    def compile(self, source: str, expression: str, arch: str, name: str) -> tuple[bytes, str]:
        self.compiled.append((threading.current_thread().name, f"{name}: {expression}"))
        assert self.may_go_on.wait(60)
        if self.fails:
            raise LowtideError(f"{expression} cannot be compiled")
        return b"cubin", expression

    def load(self, name: str, cubin: bytes, lowered: str, device: int) -> Any:
        self.loaded.append((threading.current_thread().name, name))
        return self

    def launch(self, *arguments: Any) -> None:
        pass

    def forget(self) -> None:
        self.compiled.clear()
        self.loaded.clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    compiler = Compiler()
    compiler.may_go_on.set()
    monkeypatch.setattr(_nvrtc, "compile", compiler.compile)
    monkeypatch.setattr(_nvrtc, "Function", compiler.load)
    for once in ("_load", "_compile"):
        monkeypatch.setattr(_nvrtc, once, Once(getattr(_nvrtc, once)._work))
    monkeypatch.setattr(_sz_functions, "_FUNCTIONS", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(_sz_cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: 1)
    yield compiler
    compiler.may_go_on.set()
    Sites(1).wait()


def prepare(sites: Sites, x: Tensor, rule: BoundRule = RULE) -> Memo:
    memo = sites.recall(x, rule, SITE, NEED)
    sites.prepare(memo, x, CODEC, SITE, NEED)
    return memo


def use(plan: Plan, *, replay: Replay | None = None) -> None:
    """All that a step may launch for a tensor."""
    ticket = torch.zeros(1, dtype=torch.int64)
    encoded = CODEC.encode(SMALL, plan=plan, ticket=ticket, replay=replay)
    CODEC.decode(encoded)
    CODEC.gate(encoded, SMALL)


def begin(sites: Sites, compiler: Compiler) -> Memo:
    """A site with a plan and all its kernels, whose next save finds that another model would serve better."""
    memo = prepare(sites, SMALL)
    use(memo.plan)
    compiler.forget()
    prepare(sites, LARGE)
    assert memo.survey is not None
    return memo


@pytest.mark.parametrize("replayed", [False, True])
def test_a_model_is_adopted_when_its_kernels_are_there(compiler: Compiler, replayed: bool) -> None:
    sites = Sites(refresh=1)
    sites.replayed = replayed
    memo = begin(sites, compiler)
    before = memo.plan.model
    compiler.may_go_on.clear()
    for _ in range(5):
        prepare(sites, LARGE)
        use(memo.plan)
        assert memo.plan.model is before and sites.is_fitting
    compiler.may_go_on.set()
    sites.wait()
    assert not sites.is_fitting
    here = threading.current_thread().name
    assert here not in [thread for thread, _ in compiler.compiled + compiler.loaded]
    assert {thread for thread, _ in compiler.loaded} == {"lowtide"}, "those that compile leave the driver alone"

    compiler.forget()
    prepare(sites, LARGE)
    model = memo.plan.model
    assert before is not None and model is not None and model.alphabet.values != before.alphabet.values
    use(memo.plan)
    assert not compiler.compiled and not compiler.loaded, "a step had to wait"
    use(replace(memo.plan, model=None))
    assert not compiler.compiled and not compiler.loaded, "nor does one whose model is dropped"
    use(memo.plan, replay=Replay(Cell(torch.device("cpu"))))
    assert bool(compiler.loaded) != replayed
    assert all("sz_replayed" in name for _, name in compiler.loaded)


def test_an_error_of_the_compiler_is_told_when_the_model_would_be_adopted(compiler: Compiler) -> None:
    sites = Sites(refresh=1)
    memo = begin(sites, compiler)
    before, compiler.fails = memo.plan.model, True
    prepare(sites, LARGE)
    sites.wait()
    assert memo.plan.model is before
    with pytest.raises(LowtideError, match=r"rans_encode<.*> cannot be compiled"):
        prepare(sites, LARGE)


def test_nothing_is_compiled_for_a_model_that_is_not_wanted_any_more(compiler: Compiler) -> None:
    """Its bound has leapt before the fit began: what is compiled is for the coder that does without."""
    sites, may_end = Sites(refresh=1), threading.Event()
    memo = begin(sites, compiler)
    _WORKER.submit(may_end.wait)
    prepare(sites, LARGE)
    prepare(sites, LARGE, BoundRule.parse("0.05"))
    may_end.set()
    sites.wait()
    use(memo.plan)
    assert memo.plan.model is None and not sites.is_fitting
    assert compiler.compiled and all("blocks" in name for _, name in compiler.compiled)


def test_decoders_of_a_first_plan_are_compiled_while_forward_goes_on(compiler: Compiler) -> None:
    memo = prepare(Sites(refresh=1), SMALL)
    deadline = time.monotonic() + 60
    while len(compiler.compiled) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    use(memo.plan)
    assert len(compiler.compiled) == len({name for _, name in compiler.compiled}) == 3
    threads = {thread for thread, name in compiler.compiled if "decode" in name}
    assert threads == {"lowtide-nvrtc"}
    assert {thread for thread, _ in compiler.loaded} == {threading.current_thread().name}


def test_masks_only_where_zeros_are_kept(compiler: Compiler) -> None:
    spec = TensorSpec((1 << 15,), (1,), torch.float32, torch.device("cuda", 0))
    for keep_zeros, with_model, gives in (
        (False, True, ["ONLY_VALUES"]),
        (True, True, ["ONLY_VALUES", "GATED"]),
        (True, False, ["ONLY_VALUES", "GATED"]),
    ):
        codec = Sz(coder="rans", keep_zeros=keep_zeros)
        plan = codec.plan(SMALL, Bound.absolute(0.5))
        plan = plan if with_model else replace(plan, model=None)
        encoder, *decoders = _sz_functions.missing(codec, spec, plan, replayed=False)
        assert encoder.kernel.endswith("_encode") and [kernel.give for kernel in decoders] == gives
    codec = Sz(coder="rans", predict="row")
    plan = codec.plan(torch.randn(1 << 15).sort().values, Bound.absolute(0.5))
    wanted = _sz_functions.missing(codec, spec, plan, replayed=True)
    assert len(wanted) == 4 and all(kernel.predicted and "true>" in kernel.expression for kernel in wanted)
    elsewhere = replace(spec, device=torch.device("cpu"))
    assert not _sz_functions.missing(codec, elsewhere, plan, replayed=True), "nothing is compiled for a CPU"
