"""Words that the device writes and the host reads."""

from __future__ import annotations

import pytest
import torch

from lowtide.errors import LowtideError
from lowtide.kernels import _tickets
from lowtide.kernels._tickets import Ring


def test_a_ticket_is_unknown_until_it_is_written():
    ticket = Ring().take()
    assert ticket.status == -1 and ticket.word.tolist() == [-1]
    ticket.word.fill_(7)
    assert ticket.status == 7 and ticket.wait() == 7


def test_a_word_is_used_again_only_after_it_was_written():
    ring = Ring()
    free = len(ring.free)
    written, unwritten = ring.take(), ring.take()
    late = unwritten.word
    written.word.fill_(0)
    del written, unwritten
    assert len(ring.free) == free - 1
    taken = [ring.take() for _ in range(free - 1)]
    assert all(ticket.word.data_ptr() != late.data_ptr() for ticket in taken)
    late.fill_(3)
    again = ring.take()
    assert again.word.data_ptr() == late.data_ptr() and again.status == -1


def test_a_ring_grows_when_all_words_are_out():
    ring = Ring()
    taken = [ring.take() for _ in range(len(ring.free) + 3)]
    assert len({ticket.word.data_ptr() for ticket in taken}) == len(taken)
    taken[-1].word.fill_(5)
    assert taken[-1].wait() == 5


def test_an_encoder_that_never_reports_is_an_error(monkeypatch):
    asked = []
    monkeypatch.setattr(_tickets.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append(True))
    with pytest.raises(LowtideError, match="without saying"):
        Ring().take().wait()
    assert asked
