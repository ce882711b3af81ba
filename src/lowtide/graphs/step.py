"""A training step that is captured in a CUDA graph once, and replayed: the host's work is done once, too.

Numbers in brackets are the rules of docs/dataflow.md.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowtide.errors import GraphError, LowtideWarning
from lowtide.graphs.beside import Ask
from lowtide.graphs.draws import Repeats
from lowtide.graphs.machine import Cuda, Graph, Machine
from lowtide.graphs.recording import Demand, Overflow, Recording
from lowtide.graphs.rooms import MOST, Rooms
from lowtide.graphs.schedule import Mode, Schedule
from lowtide.graphs.state import Addresses, Buffers, Gradients
from lowtide.graphs.tables import Tables
from lowtide.kernels._workspaces import Cell
from lowtide.ledger import Ledger
from lowtide.recompute import Regions
from lowtide.sites import Sites

_HOPELESS = 3
_DUE = {Mode.MEASURE: True, Mode.SETTLE: False, Mode.REHEARSE: False}


class Recorder(Protocol):
    """The part of a pipeline that a captured step works with."""

    @property
    def sites(self) -> Sites: ...

    @property
    def ledger(self) -> Ledger: ...

    def recorded(self, recording: Recording) -> Any: ...

    def finish(self) -> None: ...


class GraphStep:
    """Made by ``Session.graph``. Call it with a batch, as the function that it was made of; it returns the same.

    ``calls``, ``measured`` (by the method's controller), ``captures``, ``renewals`` (of a graph's tables, which takes
    no capture), ``replays`` and ``overflows`` count what has happened so far.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        parameters: Iterable[Tensor],
        recorder: Recorder,
        machine: Machine,
        cell: Cell,
        *,
        warmup: int,
        refresh: int,
        slack: float,
        is_measured: Callable[[], bool],
        moves: Callable[[], int],
        beside: bool = False,
        regions: Regions | None = None,
    ) -> None:
        """``is_measured``: whether statistics are wanted of this step. ``moves``: how often bounds have moved.

        ``beside``: whether encoders and decoders have a stream of their own within the graph. ``regions``: modules that
        are run again in backward.
        """
        if not 0 <= slack <= MOST:
            raise GraphError(f"slack is a share of a payload, from 0 to {MOST:g}; got {slack!r}")
        self._step = step
        self._recorder, self._machine, self._cell = recorder, machine, cell
        recorder.sites.replayed = True
        self._is_measured, self._count_moves = is_measured, moves
        self._schedule = Schedule(warmup, refresh)
        self._warmup, self._rooms = warmup, Rooms(slack)
        self._aside = machine.aside() if beside else None
        self._order: list[Ask] = []  # of what backward asks for, from the last rehearsal
        self._demand = Demand(0, 0)  # for a reserve, from there, too
        self._gradients, self._buffers, self._addresses = Gradients(parameters), Buffers(model), Addresses(model)
        self._repeats = Repeats(machine.generator, regions)
        self._strays = 0  # replays in a row that have not drawn as their rehearsal
        self._graph: Graph | None = None
        self._before: Graph | None = None  # one that is not replayed any more, for its pool
        self._recording: Recording | None = None
        self._inputs: list[Any] = []
        self._output: Any = None
        self._key: Any = None
        self._strangers = 0  # calls in a row with inputs of another shape
        self._moves = moves()
        self._has_warned = False
        self._misfits: Counter[str] = Counter()  # sites without a room, by replays in a row that they did not fit
        self.calls = self.measured = self.captures = self.renewals = self.replays = 0
        self.overflows: list[tuple[int, list[Overflow]]] = []  # with the number of the call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        self.calls += 1
        key = (tree, *map(_kind, leaves))
        if self._count_moves() != self._moves:
            self._moves = self._count_moves()
            if self._schedule.has_lasted:
                self._rooms.narrow()
            self._rooms.forget()
            self._retire()
            self._schedule.prepare()
        is_measured = self._is_measured()
        self.measured += is_measured
        if not self._is_expected(key) or is_measured or not torch.is_grad_enabled():
            return self._run_beside(leaves, tree)
        if self._graph is not None and self._schedule.is_settled and self._recorder.sites.is_fitting:
            return self._replay(leaves, tree)  # by the tables that it has, until there are others
        mode = self._schedule.next()
        if mode is Mode.CAPTURE:
            self._rooms.begin()
            if not self._renew():
                self._capture(leaves, tree)
            self._schedule.captured()
        elif mode is not Mode.REPLAY:
            return self._run(leaves, tree, mode)
        return self._replay(leaves, tree)

    def describe(self) -> str:
        """A line for the session's report."""
        text = f"CUDA graph: {self.replays} of {self.calls} steps replayed, {self.captures} captures"
        if self.renewals:
            text += f", {self.renewals} renewals"
        if self.measured:
            text += f", {self.measured} steps measured for the method"
        if self.overflows:
            call, last = self.overflows[-1]
            more = f" and {len(last) - 1} more" if len(last) > 1 else ""
            text += f", {len(self.overflows)} overflows, each repeated eagerly (the last one in call {call}: "
            text += f"{last[0]}{more})"
        return text

    @property
    def nbytes(self) -> int:
        """Bytes that belong to the graph and nobody else can use: its pool, and copies of the batch and of buffers."""
        if self._graph is None:
            return self._before.nbytes if self._before is not None else 0
        inputs = sum(leaf.nbytes for leaf in self._inputs if isinstance(leaf, Tensor))
        return self._graph.nbytes + inputs + self._buffers.nbytes

    def _is_expected(self, key: Any) -> bool:
        """Whether these are the inputs that a graph is, or will be, made for: those of the first call, as a rule."""
        if self._key is None or key == self._key:
            self._key, self._strangers = key, 0
            return True
        self._strangers += 1
        if self._strangers >= self._warmup:  # they are here to stay
            self._rooms.forget()
            self._drop()
            self._schedule.begin()
            self._key, self._strangers = key, 0
            return True
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "a CUDA graph is for inputs of one shape; this step has others and runs eagerly. Drop the last, "
                f"incomplete batch of an epoch, or pad it. After {self._warmup} such steps in a row the graph follows",
                LowtideWarning,
                stacklevel=4,
            )
        return False

    def _run_beside(self, leaves: list[Any], tree: Any) -> Any:
        """A step that no graph is for. The graph is given up if there is no memory for both."""
        pool = self._graph or self._before
        if pool is not None and not self._machine.has_room_beside(pool):
            self._drop()
            self._schedule.prepare()
        return self._run(leaves, tree, Mode.SETTLE if self._graph is not None else Mode.EAGER)

    def _run(self, leaves: list[Any], tree: Any, mode: Mode) -> Any:
        sites = self._recorder.sites
        with ExitStack() as around:
            around.enter_context(self._machine.eager())
            around.enter_context(self._gradients.watched())
            if mode in (Mode.MEASURE, Mode.REHEARSE):
                around.enter_context(self._buffers.watched())
            if mode is Mode.REHEARSE:
                self._cell.advance()
                recording = Recording(self._cell, self._rooms, is_capturing=False)
                around.enter_context(self._recorder.recorded(recording))
                around.enter_context(self._repeats.rehearsed())
            sites.due = _DUE.get(mode)
            try:
                output = _detached(self._call(leaves, tree))
            finally:
                sites.due = None
        if mode is Mode.REHEARSE:
            self._order = recording.order
        if mode in _DUE and not (mode is Mode.SETTLE and self._graph is not None):  # beside a graph nobody waits
            self._recorder.finish()
        if mode is Mode.REHEARSE:
            self._demand = recording.demand
        return output

    def _call(self, leaves: list[Any], tree: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return self._step(*args, **kwargs)

    def _capture(self, leaves: list[Any], tree: Any) -> None:
        _refuse_unsuitable(leaves)
        self._retire()
        self._inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tables = Tables(self._recorder.sites.memos())
        recording = Recording(
            self._cell, self._rooms, is_capturing=True, tables=tables, demand=self._demand, aside=self._aside,
            order=self._order,
        )  # fmt: skip
        self._buffers.prepare()
        self._addresses.note()
        _forget_casts()

        def body() -> Any:
            self._cell.advance()
            recording.begin()
            self._buffers.save()
            with self._repeats.captured():
                output = _detached(self._call(self._inputs, tree))
            recording.finish()
            return output

        try:
            with self._recorder.recorded(recording), self._gradients.captured(), self._buffers.captured():
                generators = self._repeats.prepare()
                self._graph, self._output = self._machine.capture(body, self._before, generators)
        except BaseException:
            if self._aside is not None:
                self._aside.forget()
            raise
        self._before = None
        _forget_casts()
        self._recording = recording
        self.captures += 1

    def _renew(self) -> bool:
        """Replay the graph at hand with what was measured since its capture, if that is all that has changed."""
        recording = self._recording
        if recording is None or not self._buffers.are_covered or not self._addresses.are_the_same:
            return False
        if recording.is_wasteful():
            self._drop()
            return False
        if not recording.renew(self._recorder.sites.memos()):
            return False
        self.renewals += 1
        return True

    def _replay(self, leaves: list[Any], tree: Any) -> Any:
        assert self._graph is not None and self._recording is not None, "there is a graph to replay"
        for static, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(static, Tensor):
                static.copy_(leaf)
        random = self._machine.random()
        self._recording.begin_replay()
        self._gradients.begin_replay()
        self._repeats.begin_replay()
        self._graph.replay()
        is_drawn_as_rehearsed = self._repeats.end_replay()
        overflows = self._recording.look()
        if overflows:
            return self._repeat(leaves, tree, overflows, random)
        if not is_drawn_as_rehearsed:
            return self._draw_again(leaves, tree, random)
        self._gradients.end_replay()
        self._misfits.clear()
        self._strays = 0
        self.replays += 1
        self._recorder.ledger.is_replayed = True
        output = _copied(self._output)
        if self._schedule.replayed(gets_old=self._recording.has_bounds):
            self._rooms.narrow()
            if not self._machine.has_room_beside(self._graph):
                self._drop()
        return output

    def _repeat(self, leaves: list[Any], tree: Any, overflows: list[Overflow], random: int) -> Any:
        """What backward reads of a payload that did not fit is NaN: take the step back, and do it eagerly."""
        self.overflows.append((self.calls, overflows))
        self._take_back(random)
        self._misfits.update(item.site for item in overflows if not item.room)
        for site, times in self._misfits.items():
            if times >= _HOPELESS:
                raise GraphError(
                    f"{site} has not fitted its codec in {times} replays in a row, so every step would be run twice: "
                    "keep it by a rule, or do without the graph"
                )
        return self._run(leaves, tree, Mode.EAGER)

    def _draw_again(self, leaves: list[Any], tree: Any, random: int) -> Any:
        """Modules that are run again have drawn, where nobody has provided for it: do the step eagerly."""
        self._take_back(random)
        self._strays += 1
        if self._strays >= _HOPELESS:
            raise GraphError(
                f"{self._strays} times in a row the step has drawn other random numbers when it was captured than in "
                "the step before. A graph needs to know which modules draw that are run again in backward: leave out "
                "of recompute those that draw now and then, or do without the graph"
            )
        return self._run(leaves, tree, Mode.EAGER)

    def _take_back(self, random: int) -> None:
        """All that the replay has changed is as it was before, and its graph is replayed no more."""
        self._gradients.undo()
        self._buffers.undo()
        self._machine.set_random(random)
        self._retire()
        self._schedule.overflowed()

    def _retire(self) -> None:
        """Replay the graph no more. Its pool is for the next one, if there is room for it until then."""
        graph = self._graph
        if graph is None:
            return
        before = graph if self._machine.can_hand_on(graph) else None
        self._drop()
        self._before = before

    def _drop(self) -> None:
        """Let go of the graph and its memory, when it has run; the gradients that parameters have stay theirs."""
        if self._graph is not None:
            self._machine.wait()
        self._graph = self._before = self._recording = self._output = None
        self._inputs = []
        self._gradients.drop()


class _Nothing:
    """A recorder for steps that nothing is attached to."""

    def __init__(self) -> None:
        self.sites, self.ledger = Sites(1), Ledger()

    def recorded(self, recording: Recording) -> Any:
        return nullcontext()

    def finish(self) -> None:
        pass


def graph_plainly(model: nn.Module, step: Callable[..., Any], *, warmup: int) -> GraphStep:
    """The same without Lowtide, for comparison."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise GraphError(f"CUDA graphs need a model on an NVIDIA GPU; this one is on {device}")
    return GraphStep(
        step, model, model.parameters(), _Nothing(), Cuda(device), Cell(device), warmup=warmup, refresh=1, slack=0.0,
        is_measured=lambda: False, moves=lambda: 0,
    )  # fmt: skip


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def _refuse_unsuitable(leaves: list[Any]) -> None:
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise GraphError(f"input {number} of the step needs a gradient, which a replay would not give it")


def _forget_casts() -> None:
    """Autocast keeps copies of weights until it ends; those made before or inside of a capture must not outlive it."""
    torch.clear_autocast_cache()


def _detached(output: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _copied(output: Any) -> Any:
    """The next replay writes to the same tensors."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output)
