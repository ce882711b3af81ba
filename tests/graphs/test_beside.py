"""Decoding one ahead, without a GPU: what is asked for, what is begun beside the step, and when the step waits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.graphs.beside import Ahead, Ask, Listener
from lowtide.ledger import Ledger
from lowtide.payloads import Payload
from lowtide.records import Encoded, TensorSpec
from lowtide.stores.device import OnDevice


class Log:
    """An ``Aside`` that takes notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.held: list[Tensor] = []
        self.written: list[weakref.ref[Tensor]] = []  # all that was ever held

    def begin(self) -> int:
        self.join()
        self.notes.append("begin")
        return 7

    def hold(self, *tensors: Tensor) -> None:
        self.held += tensors
        self.written += map(weakref.ref, tensors)

    def join(self) -> None:
        if self.held:
            self.notes.append("join")
        self.held = []


class Codec:
    """Decodes to its number, and to minus its number where only the mask is wanted."""

    name, keep_zeros = "numbered", True

    def __init__(self, number: int, log: Log, *, can_be_aside: bool = True) -> None:
        self.number, self.log = number, log
        if can_be_aside:
            self.decode_aside = self._decode_aside

    def decode(self, encoded: Encoded) -> Tensor:
        self.log.notes.append(f"decode {self.number}")
        return torch.tensor(float(self.number))

    def nonzero(self, encoded: Encoded) -> Tensor:
        self.log.notes.append(f"mask {self.number}")
        return torch.tensor(-float(self.number))

    def _decode_aside(self, encoded: Encoded, aside: Any, *, mask: bool) -> Tensor:
        aside.begin()
        tensor = self.nonzero(encoded) if mask else self.decode(encoded)
        aside.hold(tensor)
        return tensor

    def gate(self, encoded: Encoded, gradient: Tensor) -> Tensor:
        self.log.notes.append(f"gate {self.number}")
        return gradient + self.number


def make(log: Log, count: int, *, without: tuple[int, ...] = ()) -> list[Payload]:
    spec = TensorSpec((), (), torch.float32, torch.device("cpu"))
    held = OnDevice(Encoded("numbered", 1, spec, {}, {}), 4)
    ledger = Ledger()
    codecs: list[Any] = [Codec(number, log, can_be_aside=number not in without) for number in range(count)]
    return [Payload(codec, held, ledger, None) for codec in codecs]


def decoded_ahead(order: Sequence[Ask], log: Log, count: int, **options: Any) -> tuple[list[Payload], Ahead]:
    """Payloads of a graph whose rehearsal asked in this order."""
    payloads, ahead = make(log, count, **options), Ahead(order, log)
    for payload in payloads:
        ahead.enlist(payload)
    return payloads, ahead


def ask(payloads: list[Payload], *asks: Ask) -> list[float]:
    return [float(payloads[n].nonzero() if mask else payloads[n].decode("site")) for n, mask in asks]


def rehearse(*asks: Ask) -> list[Ask]:
    listener, payloads = Listener(), make(Log(), 4)
    for payload in payloads:
        listener.enlist(payload)
    assert ask(payloads, *asks) == [-number if mask else number for number, mask in asks]
    return listener.asked


ORDER = ((3, False), (2, False), (2, True), (1, False), (2, False), (0, False))


def test_a_rehearsal_tells_the_order() -> None:
    assert rehearse(*ORDER) == list(ORDER)


def test_every_tensor_but_the_first_is_decoded_ahead() -> None:
    log = Log()
    payloads, ahead = decoded_ahead(rehearse(*ORDER), log, 4)
    assert ask(payloads, (3, False)) == [3]
    assert log.notes == ["decode 3", "begin", "decode 2"], "the next one is begun before the first is used"
    log.notes.clear()
    assert ask(payloads, *ORDER[1:]) == [2, -2, 1, 2, 0]
    assert log.notes == [
        *("join", "begin", "mask 2"), *("join", "begin", "decode 1"), *("join", "begin", "decode 2"),
        *("join", "begin", "decode 0"), "join",
    ]  # fmt: skip
    ahead.finish()
    assert not log.held


def test_a_gradient_passes_while_the_next_tensor_is_written() -> None:
    """Between two tensors that are decoded ahead; the first one of a step waits for what was encoded last."""
    log, gradient = Log(), torch.tensor(0.5)
    order = rehearse((3, False), (1, False))
    payloads, ahead = decoded_ahead(order, log, 4)
    log.hold(torch.zeros(()))  # an encoder at work
    assert float(payloads[2].gate(gradient)) == 2.5 and log.notes == ["join", "gate 2"]
    ask(payloads, (3, False))
    log.notes.clear()
    assert float(payloads[3].gate(gradient)) == 3.5 and log.notes == ["gate 3"]
    assert ask(payloads, (1, False)) == [1] and log.notes == ["gate 3", "join"]
    ahead.finish()


def test_a_gradient_is_not_part_of_the_order() -> None:
    listener, (payload,) = Listener(), make(Log(), 1)
    listener.enlist(payload)
    assert float(payload.gate(torch.tensor(1.0))) == 1 and listener.asked == []


def test_whoever_asks_in_another_order_gets_what_was_asked_for() -> None:
    log = Log()
    payloads, ahead = decoded_ahead(rehearse(*ORDER), log, 4)
    asks = [(0, False), (3, False), (1, False), (3, True), (2, True), (1, False), (0, True)]
    assert ask(payloads, *asks) == [-number if mask else number for number, mask in asks]
    ahead.finish()
    assert not log.held


@pytest.mark.parametrize("other", [(0, False), (3, True)], ids=["the last one", "one that nobody rehearsed"])
def test_what_nobody_came_for_is_let_go(other: Ask) -> None:
    """Or a tensor that was decoded for nothing would stay in the graph's memory until the step ends."""
    log = Log()
    payloads, ahead = decoded_ahead(rehearse(*ORDER), log, 4)
    ask(payloads, (3, False))
    assert len(log.written) == 1 and all(tensor() is not None for tensor in log.written)
    ask(payloads, other)
    assert all(tensor() is None for tensor in log.written)
    ahead.finish()


def test_payloads_that_are_gone_or_were_never_there_are_not_decoded_ahead() -> None:
    log = Log()
    payloads, _ = decoded_ahead([(2, False), (1, False), (3, False), (0, False)], log, 3)  # one fewer than rehearsed
    gone = payloads.pop(1)
    del gone
    assert float(payloads[1].decode("site")) == 2 and log.notes == ["decode 2"]
    assert float(payloads[0].decode("site")) == 0 and log.notes == ["decode 2", "decode 0"]


def test_codecs_that_cannot_are_left_to_the_step() -> None:
    log = Log()
    payloads, _ = decoded_ahead([(2, False), (1, False), (0, False)], log, 3, without=(1,))
    assert ask(payloads, (2, False), (1, False), (0, False)) == [2, 1, 0]
    assert log.notes == ["decode 2", "decode 1", "begin", "decode 0", "join"]


@pytest.mark.parametrize("order", [[], [(0, False)]])
def test_a_step_that_asks_for_next_to_nothing(order: list[Ask]) -> None:
    log = Log()
    payloads, ahead = decoded_ahead(order, log, 1)
    assert ask(payloads, (0, False), (0, False)) == [0, 0] and "begin" not in log.notes
    ahead.finish()
