"""How much room the payloads of a graph have. Room that is not used is memory wasted; what does not fit costs an eager
step and another capture.

Batches differ, and so do payloads: one of them may take half as much again, while all together hardly ever take a tenth
more. So payloads that are placed chunk by chunk have little room of their own and a reserve in common; what a replay
took of it says how large the next graph's has to be. Payloads that lie in one piece have a slack of their own, site by
site: much where they have grown from one replay to another, little where they have not.
"""

from __future__ import annotations

MOST, LEAST = 1.0, 1 / 64
_FARTHEST = (1 << 31) - 1  # the last word of a reserve that a chunk can name
_LEAST_IN_COMMON = 1 / 16
OWN = 1 / 64  # of a payload with a reserve behind it: room beyond what its site took last


class Room:
    """Of the payloads of one site. Their sizes are in words a value."""

    __slots__ = ("_base", "_needed", "_seen", "slack")

    def __init__(self, slack: float) -> None:
        self.slack = slack
        self._seen = 0.0  # the most that a replay of the last graph needed
        self._base = 0.0  # what this graph was captured for, without the slack
        self._needed = 0.0  # the most that a replay of it needed

    def begin(self) -> None:
        """Another graph is captured, or this one renewed."""
        self._seen, self._base, self._needed = self._needed, 0.0, 0.0

    def forget(self) -> None:
        """What comes has other sizes."""
        self._seen = self._base = self._needed = 0.0

    def make(self, rate: float) -> float:
        """How large to make it where the last eager payload took ``rate``; never more than twice that."""
        return self._with(self.slack, rate)

    def least(self, rate: float) -> float:
        """How large one that is there has to be to do instead: half the slack is still what payloads have grown by."""
        return self._with(self.slack / 2, rate)

    def _with(self, slack: float, rate: float) -> float:
        base = max(rate, self._seen)
        self._base = max(self._base, base)  # several payloads may share a site
        return min(base * (1 + slack), rate * (1 + MOST))

    def note(self, rate: float) -> None:
        """What a replay needed."""
        if rate > self._needed:
            self._needed = rate

    def widen(self, short: float) -> None:
        """A replay needed more than there was, by this share of it."""
        self.slack = min(2 * max(self.slack, short, LEAST), MOST)

    def narrow(self) -> None:
        """All replays of the graph have fitted: try with less, but have twice what they grew by."""
        if self._base:
            growth = self._needed / self._base - 1
            self.slack = min(max(self.slack / 2, 2 * growth, LEAST), MOST)


class Reserve:
    """How large the room in common is, as a share of that of the payloads that share it."""

    def __init__(self, slack: float) -> None:
        """Twice the slack of a payload that is alone with it, at first."""
        self.share, self._least = min(2 * slack, MOST), min(slack, _LEAST_IN_COMMON)
        self._taken = 0.0  # the most that a replay of this graph took

    def words(self, volume: float) -> int:
        """Of the reserve for payloads that are expected to take so many."""
        return min(int(self.share * volume), _FARTHEST)

    def note(self, share: float) -> None:
        """What a replay took."""
        self._taken = max(self._taken, share)

    def widen(self) -> None:
        """A replay needed more than there was."""
        self.share = min(2 * max(self.share, self._taken, LEAST), MOST)
        self._taken = 0.0

    def narrow(self) -> None:
        """All replays of the graph have fitted: try with less, but have twice what they took."""
        self.share = min(max(self.share / 2, 2 * self._taken, self._least), MOST)
        self._taken = 0.0


class Rooms:
    """The rooms of all sites, and the reserve."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._rooms: dict[str, Room] = {}
        self.reserve = Reserve(slack)

    def of(self, site: str) -> Room:
        room = self._rooms.get(site)
        if room is None:
            room = self._rooms[site] = Room(self._slack)
        return room

    def begin(self) -> None:
        for room in self._rooms.values():
            room.begin()

    def forget(self) -> None:
        for room in self._rooms.values():
            room.forget()

    def narrow(self) -> None:
        self.reserve.narrow()
        for room in self._rooms.values():
            room.narrow()
