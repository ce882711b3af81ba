"""Times that tests of plans can rely on, and one thread to run them in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lowtide
from lowtide.planner.trial import Trial
from lowtide.threads import one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks here are small, and their steps many."""
    with one_thread():
        yield


@pytest.fixture
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are run, but take the time they are said to take: 10 ms plain, 13 compressed, 14 where blocks run again."""
    run = Trial._time

    def told(trial: Trial, session: lowtide.Session | None = None) -> float:
        run(trial, session)
        return 10.0 if session is None else 13.0 if session._scopes.regions is None else 14.0

    monkeypatch.setattr(Trial, "_time", told)
