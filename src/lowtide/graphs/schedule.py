"""Which calls of a step run eagerly, which one is captured, and which are replays."""

from __future__ import annotations

from enum import Enum

from lowtide.errors import GraphError

_FIRST_INTERVAL = 16  # replays, after which bounds and tables are measured anew; doubled each time, up to `refresh`


class Mode(Enum):
    EAGER = "eager"  # bounds and tables are measured when it is their turn
    MEASURE = "measure"  # eager; all of them are measured
    SETTLE = "settle"  # eager; what was measured reaches the host
    REHEARSE = "rehearse"  # eager; the tables made of it are in use, with the kernels of a graph
    CAPTURE = "capture"  # or renew the graph that is there
    REPLAY = "replay"


_LAST = {3: Mode.MEASURE, 2: Mode.SETTLE, 1: Mode.REHEARSE}  # by the number of eager calls that are left


class Schedule:
    """``warmup`` eager calls, the last three of which prepare the capture; then a capture and replays; and again."""

    def __init__(self, warmup: int, refresh: int) -> None:
        if not isinstance(warmup, int) or warmup < len(_LAST):
            raise GraphError(f"warmup is a number of eager steps, {len(_LAST)} or more; got {warmup!r}")
        if not isinstance(refresh, int) or refresh < 1:
            raise GraphError(f"refresh is a number of replays, 1 or more; got {refresh!r}")
        self._warmup, self._refresh = warmup, refresh
        self.begin()

    def begin(self) -> None:
        """Start from nothing, as for inputs of another shape."""
        self._left, self._replays = self._warmup, 0
        self._has_graph = False
        self._interval = min(_FIRST_INTERVAL, self._refresh)

    def next(self) -> Mode:
        """The mode of a call with nothing against it."""
        if self._left > 0:
            mode = _LAST.get(self._left, Mode.EAGER)
            self._left -= 1
            return mode
        return Mode.REPLAY if self._has_graph else Mode.CAPTURE

    def captured(self) -> None:
        """There is a graph, a new one or one that is as good."""
        self._has_graph, self._replays = True, 0

    def replayed(self, *, gets_old: bool) -> bool:
        """Take note of a replay; True if it was the last one of its graph."""
        self._replays += 1
        if not gets_old or self._left > 0 or self._replays < self._interval:
            return False
        self._interval = min(2 * self._interval, self._refresh)
        self.prepare()
        return True

    @property
    def is_settled(self) -> bool:
        """Whether all has been measured, and only the rehearsal is left before a capture."""
        return self._left == 1

    @property
    def has_lasted(self) -> bool:
        """Whether the graph at hand has been replayed often enough to tell how payloads grow."""
        return self._has_graph and self._replays >= min(_FIRST_INTERVAL, self._refresh)

    def prepare(self) -> None:
        """Something that is baked into the graph has changed, or may have: renew it soon, or capture another one."""
        self._left, self._has_graph = max(self._left, len(_LAST)), False

    def overflowed(self) -> None:
        """Values change faster than was thought."""
        self._interval = min(_FIRST_INTERVAL, self._refresh)
        self.prepare()
