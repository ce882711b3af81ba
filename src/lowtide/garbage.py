"""Python's collector of cyclic garbage, kept out of the middle of training steps.

What is saved for backward is thousands of small objects that live from forward to backward and die without the
collector's help. As it is set by default it runs several times in between, takes them for long-lived, and when a
quarter of what lives long is new it looks through every object of the process: with torch and a few libraries that is
hundreds of milliseconds, every few dozen steps. Plain training keeps no such objects and knows no such pauses.

While a session is attached, young objects are looked through at the end of each step instead, when few of them are
alive, and within a step only where far more pile up than a step makes. Cycles are found no later than before.
"""

from __future__ import annotations

import gc
import threading

MOST_YOUNG = 20_000  # objects; a step of ResNet-50 has some 2,000 at a time


class Tidiness:
    """In force from its making until ``close``, or until it is dropped; the collector's own setting is then back."""

    _lock = threading.RLock()  # a collection may close another one while this thread has it
    _users = 0
    _before = 0  # the collector's first threshold without us
    _ours = 0  # and what we have made of it

    def __init__(self) -> None:
        cls = Tidiness
        with cls._lock:
            self._is_closed = False
            cls._users += 1
            first, *others = gc.get_threshold()
            if cls._users == 1 or first != cls._ours:  # nobody else is here, or somebody has set it meanwhile
                # 0 means that it never runs: that is the user's choice.
                cls._before, cls._ours = first, max(first, MOST_YOUNG) if first else 0
                gc.set_threshold(cls._ours, *others)

    def end_step(self) -> None:
        """Look through the objects of this step that are still alive."""
        if gc.isenabled():
            gc.collect(1)

    def close(self) -> None:
        """Once is enough."""
        cls = Tidiness
        with cls._lock:
            if self._is_closed:
                return
            self._is_closed = True
            cls._users -= 1
            first, *others = gc.get_threshold()
            if cls._users == 0 and first == cls._ours:
                gc.set_threshold(cls._before, *others)

    def __del__(self) -> None:
        self.close()
