"""Times that tests of plans can rely on."""

from __future__ import annotations

import pytest

import lowtide
from lowtide.planner.trial import Trial


@pytest.fixture
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are run, but take the time they are said to take: 10 ms plain, 13 compressed, 14 where blocks run again."""
    run = Trial._time

    def told(trial: Trial, session: lowtide.Session | None = None) -> float:
        run(trial, session)
        return 10.0 if session is None else 13.0 if session._scopes.regions is None else 14.0

    monkeypatch.setattr(Trial, "_time", told)
