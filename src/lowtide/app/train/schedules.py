"""Learning rates as functions of the step: nothing to store, nothing to restore.

With s the share of the run that is done and w the share in which the rate rises:

- onecycle: Smith and Topin, "Super-Convergence" (2018), as ``torch.optim.lr_scheduler.OneCycleLR`` has it, without its
  cycle of the momentum: from lr / 25 up to lr, then down to lr / 250000, both along half a cosine;
- cosine: up linearly, then lr (1 + cos(pi t)) / 2 with t from 0 to 1 over the rest (Loshchilov and Hutter, 2017);
- linear: up linearly, then down linearly to 0;
- constant: up linearly, then lr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lowtide.errors import UnknownNameError

_DIVISOR, _LAST_DIVISOR = 25.0, 1e4
WARMUPS: Mapping[str, float] = {"onecycle": 0.25, "cosine": 0.05, "linear": 0.05, "constant": 0.0}


def make_schedule(name: str, *, lr: float, steps: int, warmup: float) -> Callable[[int], float]:
    """The rate of each step from 0 to ``steps - 1``."""
    if name == "onecycle":
        return lambda step: _one_cycle(step, lr, steps, warmup)
    if name not in WARMUPS:
        raise UnknownNameError("schedule", name, WARMUPS)
    rising = round(warmup * steps)

    def rate(step: int) -> float:
        if step < rising:
            return lr * (step + 1) / rising
        done = (step - rising) / max(steps - rising, 1)
        if name == "cosine":
            return lr * (1 + math.cos(math.pi * done)) / 2
        return lr * (1 - done) if name == "linear" else lr

    return rate


def _one_cycle(step: int, lr: float, steps: int, warmup: float) -> float:
    top = warmup * steps - 1
    if step <= top:
        return _ease(lr / _DIVISOR, lr, step / top if top else 1.0)
    return _ease(lr, lr / _DIVISOR / _LAST_DIVISOR, (step - top) / max(steps - 1 - top, 1e-9))


def _ease(begin: float, end: float, share: float) -> float:
    """Half a cosine from one rate to the other."""
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * min(share, 1.0)))
