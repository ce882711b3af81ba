"""The kernels of ``sz`` as graphs have them, under the emulator: dither that changes, payloads that do not fit, and
launches that are repeated with the same arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guarded import Guarded
from same_payload import assert_same_values
from simt import EmulatedFunction, requires_compiler
from test_kernel_sz_cuda import emulated
from torch import Tensor

from lowtide.codecs.sz import Plan, Sz
from lowtide.kernels import _sz_cuda, _workspaces
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.kernels._workspaces import Cell, Replay
from lowtide.records import Bound, Encoded

CPU = torch.device("cpu")
BOUND = 0.5
TICKETS: list[Tensor] = []  # kept, because a launch that is repeated writes to them again


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch, emulate: Callable[..., Any]) -> Any:
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: 1)
    return emulate(_sz_cuda, emulated)


class Beside:
    """Where kernels run beside a step: here, right away."""

    stream = 7

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def begin(self) -> int:
        return self.stream

    def hold(self, *tensors: Tensor) -> None:
        self.held += tensors

    def join(self) -> None:
        self.held.clear()


def make(coder: str, dtype: torch.dtype = torch.float32, count: int = 12 * 4096 + 77) -> tuple[SzCuda, Tensor, Plan]:
    predicted = coder == "predicted"
    x = 3 * torch.sin(torch.arange(count) / 15) if predicted else torch.randn(count)
    x[100:400] *= 1e9
    twin = SzCuda(Sz(coder="rans", predict="row") if predicted else Sz(coder=coder))
    plan = twin.codec.plan(x.to(dtype), Bound.absolute(BOUND))
    assert (plan.model is None) == (coder == "blocks")
    assert plan.model is None or plan.model.alphabet.predicted == predicted
    return twin, x.to(dtype), plan


def encode(twin: SzCuda, x: Tensor, plan: Plan, replay: Replay, room: int | None = None) -> tuple[Encoded, int]:
    ticket = torch.full((1,), -1, dtype=torch.int64)
    TICKETS.append(ticket)
    encoded = twin.encode(x, seed=9, plan=plan, ticket=ticket, capacity=room, replay=replay)
    return encoded, int(ticket)


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("coder", ["blocks", "rans", "predicted"])
def test_every_replay_has_its_own_dither(coder: str, dtype: torch.dtype) -> None:
    twin, x, plan = make(coder, dtype)
    cell = Cell(CPU)
    seen = []
    for _ in range(3):
        encoded, needed = encode(twin, x, plan, Replay(cell))
        assert 0 < needed <= encoded.tensors["words"].numel()
        decoded = twin.decode(encoded)
        assert bool(((decoded.double() - x.double()).abs() <= BOUND).all())
        seen.append(decoded)
        cell.advance()
    assert_same_values(seen[0], twin.decode(twin.encode(x, seed=9, plan=plan)), "number 0 is as outside of graphs")
    coded = x.abs() < 1e6
    for first, second in ((0, 1), (0, 2), (1, 2)):
        errors = [(seen[one].double() - x.double())[coded] for one in (first, second)]
        assert abs(float(torch.corrcoef(torch.stack(errors))[0, 1])) < 0.03, "errors of two replays are independent"


@requires_compiler
def test_a_mask_does_not_depend_on_the_replay() -> None:
    x = torch.randn(9000).relu()
    twin = SzCuda(Sz(coder="rans", keep_zeros=True))
    plan = twin.codec.plan(x, Bound.absolute(BOUND))
    cell = Cell(CPU)
    cell.advance()
    encoded, _ = encode(twin, x, plan, Replay(cell))
    assert torch.equal(twin.nonzero(encoded), (x != 0).float())


@requires_compiler
@pytest.mark.parametrize("coder", ["blocks", "rans", "predicted"])
def test_what_did_not_fit_is_nan_and_the_rest_is_right(coder: str, guarded: Guarded) -> None:
    """Nothing is read past the payload either: there is no memory there to be sure of."""
    twin, x, plan = make(coder)
    cell = Cell(CPU)
    whole, needed = encode(twin, x, plan, Replay(cell))
    expected = twin.decode(whole)
    size = 1024 if coder == "blocks" else plan.model.alphabet.chunk

    def starts_of(encoded: Encoded) -> list[int]:
        """Chunks of rans lie in the order in which they were ready."""
        starts: Tensor = encoded.tensors["offsets"][:-1] if coder == "blocks" else encoded.tensors["heads"][::3]
        return starts.tolist()

    one = sorted(starts_of(whole))[5]
    for room in (0, 1, 31, needed // 3, one, one - 1, needed - 1, needed):
        encoded, told = encode(twin, x, plan, Replay(cell), room)
        assert told == needed
        decoded = twin.decode(encoded)
        guarded.check()
        starts = starts_of(encoded)
        follows = dict(itertools.pairwise([*sorted(starts), needed]))
        lost = [chunk for chunk, start in enumerate(starts) if follows[start] > room]
        assert len(lost) == sum(end > room for end in follows.values())
        for chunk in range(len(starts)):
            got, right = (values[chunk * size : (chunk + 1) * size] for values in (decoded, expected))
            assert bool(got.isnan().all()) if chunk in lost else torch.equal(got, right), f"chunk {chunk} of {room}"


@requires_compiler
@pytest.mark.parametrize("coder", ["blocks", "rans"])
def test_beside_a_step_all_that_a_launch_touches_is_held(coder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[int] = []
    launch = EmulatedFunction.launch
    monkeypatch.setattr(
        EmulatedFunction, "launch", lambda self, *arguments: streams.append(arguments[-1]) or launch(self, *arguments)
    )
    twin, x, plan = make(coder)
    beside = Beside()
    replay = Replay(Cell(CPU), beside)
    encoded, _ = encode(twin, x, plan, replay)
    expected = twin.decode(encode(twin, x, plan, Replay(Cell(CPU)))[0])
    held = {tensor.data_ptr() for tensor in beside.held}
    assert x.data_ptr() in held and encoded.tensors["heads" if coder == "rans" else "offsets"].data_ptr() in held
    assert {plan.grid.inverse.data_ptr(), plan.grid.promised.data_ptr()} <= held
    beside.join()
    decoded = twin.decode_aside(encoded, beside, mask=False)
    assert_same_values(decoded, expected, "decoded beside the step")
    held = {tensor.data_ptr() for tensor in beside.held}
    assert {decoded.data_ptr(), *(part.data_ptr() for part in encoded.tensors.values())} <= held
    assert streams == [beside.stream, 0, 0, beside.stream], "what is compared with it runs in the step"


@requires_compiler
@pytest.mark.parametrize("coder", ["blocks", "rans", "predicted"])
def test_launches_can_be_repeated_with_the_same_arguments(coder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a replay does, a large payload and then a small one: nothing that a launch needs is used up by it."""
    launches: list[tuple[Any, ...]] = []

    class Recorded:
        def __init__(self, function: Any) -> None:
            self._function = function

        def launch(self, *arguments: Any) -> None:
            launches.append((self._function, arguments))
            self._function.launch(*arguments)

    monkeypatch.setattr(_sz_cuda, "_function", lambda *args, **options: Recorded(emulated(*args, **options)))
    twin, x, plan = make(coder)
    small = x[: 4096 + 9].clone()
    cell = Cell(CPU)
    replay = Replay(cell)
    parts = [encode(twin, values, plan, replay)[0] for values in (x, small)]
    words = replay._spaces[(CPU, 0)]._words
    before = list(launches)
    for _ in range(3):
        x.copy_(torch.randn(len(x)) * 3)
        small.copy_(torch.randn(len(small)) / 3)
        cell.advance()
        words.zero_()  # captured with the graph
        for function, arguments in before:
            function.launch(*arguments)
        for values, encoded in zip((x, small), parts, strict=True):
            error = (twin.decode(encoded).double() - values.double()).abs()
            assert bool((error <= BOUND).all())
            fresh, _ = encode(twin, values, plan, Replay(cell))
            assert_same_values(twin.decode(encoded), twin.decode(fresh), "as if encoded anew")


def with_reserve(words: int, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """A graph's launches with so many words in common, in memory that is guarded."""
    monkeypatch.setattr(_workspaces, "torch", guarded)
    replay = Replay(Cell(CPU))
    replay.begin(words)
    return replay


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_does_not_fit_goes_to_the_reserve(
    dtype: torch.dtype, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two payloads; whole chunks, those that are stored raw included."""
    twin, x, plan = make("rans", dtype)
    x[3 * 4096 : 4 * 4096] = torch.randn(4096).mul(1e6).to(dtype)
    other = torch.randn(9 * 4096).to(dtype)
    expected = [twin.decode(encode(twin, values, plan, Replay(Cell(CPU)))[0]) for values in (x, other)]
    needed = [encode(twin, values, plan, Replay(Cell(CPU)))[1] for values in (x, other)]
    largest = twin.chunk(plan, dtype)
    assert largest == 4096 * dtype.itemsize // 4
    for rooms in ((0, 0), (needed[0] // 2, needed[1] // 3), (31, needed[1]), (needed[0] - 1, needed[1] - 1)):
        words = sum(need - room + largest for need, room in zip(needed, rooms, strict=True) if need > room)
        replay = with_reserve(words, guarded, monkeypatch)
        made = [encode(twin, values, plan, replay, room) for values, room in zip((x, other), rooms, strict=True)]
        assert [told for _, told in made] == needed, "what is asked for does not depend on where it lies"
        for (encoded, _), right in zip(made, expected, strict=True):
            assert_same_values(twin.decode(encoded), right, f"rooms {rooms}")
        taken = int(replay._reserve.taken)
        assert 0 < taken <= words
        heads = torch.cat([encoded.tensors["heads"][::3] for encoded, _ in made])
        assert int((heads < 0).sum()) >= 1, "the numbers of its words have the top bit"
        guarded.check()


@requires_compiler
def test_a_reserve_that_is_used_up_loses_what_has_no_place(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    twin, x, plan = make("rans")
    expected = twin.decode(encode(twin, x, plan, Replay(Cell(CPU)))[0])
    _, needed = encode(twin, x, plan, Replay(Cell(CPU)))
    room, size, seen = needed // 3, plan.model.alphabet.chunk, set()
    for words in (1, 31, needed // 5, needed // 2, needed):
        encoded, told = encode(twin, x, plan, with_reserve(words, guarded, monkeypatch), room)
        assert told == needed
        decoded = twin.decode(encoded)
        guarded.check()
        for chunk, start in enumerate(encoded.tensors["heads"][::3].tolist()):
            got, right = (values[chunk * size : (chunk + 1) * size] for values in (decoded, expected))
            is_lost = start >= 0 and bool(got.isnan().all())
            seen.add((start < 0, is_lost))
            assert is_lost or torch.equal(got, right), f"chunk {chunk} with {words} words"
        assert bool(decoded.isnan().any()) == (words < needed - room)
    assert seen == {(False, False), (True, False), (False, True)}


@requires_compiler
def test_every_replay_begins_with_the_whole_reserve(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays where it is, and so does what launches have been told of it."""
    twin, x, plan = make("rans")
    replay = with_reserve(1 << 20, guarded, monkeypatch)
    numbers, taken = replay.reserve, []
    for _ in range(3):
        encoded, _ = encode(twin, x, plan, replay, 100)
        assert not bool(twin.decode(encoded).isnan().any())
        taken.append(int(replay._reserve.taken))
        replay.begin(1 << 20)
        assert replay.reserve == numbers and int(replay._reserve.taken) == 0
    assert taken[0] > 0 and taken == taken[:1] * 3
