"""For code that must not wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting(*, is_idle: bool = True) -> Iterator[None]:
    """Whatever makes the host wait for the device raises. The device has nothing to do at first, if ``is_idle``.

    Torch says that the mode is a prototype once it is on, and warnings are errors here: so that is said inside of
    ``try``, or the mode would stay on for all tests that follow.
    """
    if is_idle:
        torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
