"""The largest batch that fits, found by running real steps; and what a larger batch does to the learning rate.

Memory at the peak of a step is close to a line in the size of the batch: peak(b) = a + c b, a for weights, gradients
and the optimizer's state, c for what each sample adds. Two sizes give the line, the line gives the size to jump to,
and a step at that size is the proof. Where the step contradicts the line (another layer holds the peak, an algorithm
with another workspace was chosen, memory is fragmented) the line is drawn anew, and where that does not help the
sizes in between are halved. Near the limit it is luck what fits: where the gaps of the allocator lie, and how far the
host runs ahead of the device, is not the same twice. So the answer is run once more, and longer, before it is given.
COMET grows the batch in this way once compression has made room (VLDB 2022): powers of two, 5 % held back, a maximum
set by the user.
"""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lowtide import sizes
from lowtide.errors import SizeError, UnknownNameError
from lowtide.reports.text import size as show
from lowtide.reports.text import table
from lowtide.snapshot import Snapshot

POWER_OF_TWO = "power of two"
_LONGER = 4  # times as many steps prove the answer as make a trial
_DOUBT = 0.1  # of a prediction, where it stands between the batch and one that may be twice as large
_RULES: dict[str, Callable[[float], float]] = {
    "none": lambda growth: 1.0,
    "linear": lambda growth: growth,
    "sqrt": lambda growth: growth**0.5,
}
# What torch and the libraries below it say, where they do not raise OutOfMemoryError. The last two are cuDNN's words
# for finding no algorithm whose workspace fits.
_OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "alloc_failed",
    "unable to find an engine to execute this computation",
    "no valid convolution algorithms available",
)


class Meter(Protocol):
    """Where memory is measured. Beyond what there is, a step raises what ``is_out_of_memory`` recognises."""

    def limit(self) -> int:
        """Bytes that training may fill at most."""
        ...

    def peak(self, step: Callable[[], object]) -> int:
        """Run the step, or several, right behind the ones before; bytes in use at the peak."""
        ...

    def clean(self) -> None:
        """Give memory back that is cached and not in use."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMeter:
    """Torch's allocator on one GPU."""

    device: torch.device

    def limit(self) -> int:
        """What is free or torch's own already, and not more than ``set_per_process_memory_fraction`` allows."""
        free, total = torch.cuda.mem_get_info(self.device)
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        return min(free + torch.cuda.memory_reserved(self.device), int(share * total))

    def peak(self, step: Callable[[], object]) -> int:
        """Does not wait for the device first: a host that is ahead of it, as in training, keeps more of a session's
        tensors."""
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def clean(self) -> None:
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Trial:
    """One size that was tried. ``peak`` is None if memory ran out, ``predicted`` if too little was known."""

    batch: int
    peak: int | None
    predicted: int | None
    fits: bool

    @property
    def outcome(self) -> str:
        if self.peak is None:
            return "out of memory"
        return "fits" if self.fits else "too large"


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The result: the largest batch that fits, or 0 if not even the smallest does.

    ``peak`` and ``predicted`` are bytes in use at the peak of a step of that size, measured and as the line had it
    before. ``allowed`` is what the peak was compared with, ``why`` says why the batch is not larger.
    """

    batch: int
    peak: int | None
    predicted: int | None
    allowed: int
    why: str
    tried: tuple[Trial, ...]

    def __str__(self) -> str:
        rows = [(str(trial.batch), _show(trial.peak), _show(trial.predicted), trial.outcome) for trial in self.tried]
        found = (
            f"batch {self.batch}: peak {_show(self.peak)} of {show(self.allowed)}" if self.batch else "no batch fits"
        )
        return "\n".join([f"{found}; {self.why}", "", *table(("batch", "peak", "predicted", "outcome"), rows)])


def find_batch_size(
    run_step: Callable[[int], object],
    *,
    state: Iterable[Any],
    start: int,
    maximum: int,
    granularity: str | int = POWER_OF_TWO,
    budget: int | str | None = None,
    reserve: float = 0.05,
    steps: int = 3,
    device: torch.device | str | int | None = None,
    meter: Meter | None = None,
) -> BatchSize:
    """The largest batch whose training step fits the device, or a budget, with some of it held back.

    Every size that counts has really been run, and the answer twice, then for four times as many steps: forward,
    backward, optimizer. Running out of
    memory during the search is a finding, not a failure. The search does not train: each trial begins with the state as
    it is now, and so does whatever comes after the search. Gradients are None then. An error that is not about memory
    is raised, with the state as it was.

    Args:
        run_step: ``run_step(n)`` makes a batch of ``n`` samples (of the size and dtype of real ones) and takes one
            whole training step with it. What it draws from a data loader is gone.
        state: what a step changes: the model, the optimizer, and if there are, Lowtide's session, a gradient scaler, a
            scheduler: anything with ``state_dict`` and ``load_state_dict``.
        start: the size to begin with, as a rule the one in use. If it does not fit, smaller ones are tried.
        maximum: the largest size to consider.
        granularity: sizes are powers of two, or multiples of this number.
        budget: bytes (or "16GiB") that torch may have allocated at the peak; without one, what the device has.
        reserve: the share of that to hold back, for fragmentation and for what later steps need more than these.
        steps: of a trial; the peak is that of the last one. The first makes the optimizer's state and workspaces, and a
            Lowtide session learns the sizes of its payloads. When the answer is run again, all steps after these count.
        device: the GPU to measure on (default: the current one).
        meter: measures memory in another way; needed where there is no GPU.
    """
    candidates = _candidates(granularity, start, maximum)
    if not 0 <= reserve < 1:
        raise SizeError(f"reserve is a share of the memory, at least 0 and less than 1; got {reserve!r}")
    if steps < 1:
        raise SizeError(f"a trial has at least one step; got steps={steps!r}")
    most = sizes.parse(budget, what="budget") if budget is not None else None
    meter = meter if meter is not None else _cuda_meter(device)
    before = Snapshot(state)
    meter.clean()
    limit = meter.limit() if most is None else min(most, meter.limit())
    search = _Search(candidates, candidates.index(start), allowed=int(limit * (1 - reserve)))
    while (size := search.next_size()) is not None:
        try:
            peak = _measure(run_step, size, steps, meter, _LONGER if search.is_proof(size) else 1)
        finally:
            before.restore()
        gc.collect()
        meter.clean()
        search.note(size, peak)
    return search.result()


def scale_lr(lr: float, old: int, new: int, rule: str = "none") -> float:
    """The learning rate for batch ``new`` where ``lr`` served for batch ``old``.

    ``linear``: lr * new / old (Goyal et al. 2017, for SGD, with a warm-up). ``sqrt``: lr * sqrt(new / old), which keeps
    the variance of an update (Krizhevsky 2014; the usual choice for Adam). ``none``: as it was.
    """
    if rule not in _RULES:
        raise UnknownNameError("rule for the learning rate", rule, _RULES)
    if min(old, new) < 1:
        raise SizeError(f"batch sizes are at least 1; got old={old}, new={new}")
    return lr * _RULES[rule](new / old)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, in any of the forms that torch, CUDA and cuDNN have for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def _measure(run_step: Callable[[int], object], size: int, steps: int, meter: Meter, longer: int) -> int | None:
    """The peak of the last of some steps, or of those that make it ``longer``; None if memory ran out. The exception,
    and with it what its frames hold, is gone when this returns."""

    def run(count: int) -> None:
        for _ in range(count):
            run_step(size)

    try:
        run(steps - 1)
        return meter.peak(lambda: run(1 + steps * (longer - 1)))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _candidates(granularity: str | int, start: int, maximum: int) -> Sequence[int]:
    """The sizes to choose among, ascending."""
    if not 1 <= start <= maximum:
        raise SizeError(f"start is at least 1 and at most maximum; got start={start}, maximum={maximum}")
    found: Sequence[int]
    if granularity == POWER_OF_TWO:
        found = [1 << power for power in range(maximum.bit_length())]
    elif isinstance(granularity, int) and not isinstance(granularity, bool) and granularity >= 1:
        found = range(granularity, maximum + 1, granularity)
    elif isinstance(granularity, str):
        raise UnknownNameError("granularity", granularity, [POWER_OF_TWO, "a number such as 32"])
    else:
        raise SizeError(f"granularity is {POWER_OF_TWO!r} or a number of samples, 1 or more; got {granularity!r}")
    if start not in found:
        at = bisect_left(found, start)
        near = " or ".join(str(size) for size in found[max(at - 1, 0) : at + 1])
        text = f"a {granularity}" if isinstance(granularity, str) else f"a multiple of {granularity}"
        raise SizeError(f"start={start} is not {text} up to {maximum}; use {near}" if near else
                        f"no size up to maximum={maximum} is {text}")  # fmt: skip
    return found


def _cuda_meter(device: torch.device | str | int | None) -> CudaMeter:
    if device is None and torch.cuda.is_available():
        device = torch.cuda.current_device()
    found = torch.device(device) if device is not None else torch.device("cpu")
    if found.type != "cuda":
        raise SizeError(f"memory on {found} cannot be measured, only on a CUDA device: name one, or pass a meter")
    return CudaMeter(found if found.index is not None else torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, slots=True)
class _Line:
    """peak(b) = fixed + each * b."""

    fixed: float
    each: float

    def at(self, size: int) -> int:
        return int(self.fixed + self.each * size)

    def largest(self, allowed: int) -> float:
        return (allowed - self.fixed) / self.each if self.each > 0 else float("inf")


@dataclass(slots=True)
class _Search:
    """Which size to try next, from what happened so far. Sizes are ascending; larger ones are taken to need more."""

    sizes: Sequence[int]
    start: int
    allowed: int
    trials: list[Trial] = field(default_factory=list)
    _fits: int = -1  # index of the largest size that fits, as far as is known
    _fails: int = -1  # index of the smallest size that does not
    _has_doubted: bool = False
    _is_confirmed: bool = False

    def __post_init__(self) -> None:
        self._fails = len(self.sizes)

    def next_size(self) -> int | None:
        """The size to try next, which is the answer itself once all others are excluded; None if it has fit twice."""
        size = self._open_size()
        if size is None and self._fits >= 0 and not self._is_confirmed:
            return self.sizes[self._fits]
        return size

    def is_proof(self, size: int) -> bool:
        """Whether that size has fit before, and is the answer if it does again."""
        return self._fits >= 0 and size == self.sizes[self._fits]

    def _open_size(self) -> int | None:
        """A size between the largest that fits and the smallest that does not; None if there is none worth trying."""
        if not self.trials:
            return self.sizes[self.start]
        if self._is_confirmed or self._fails - self._fits == 1:
            return None
        guess = self._guess()
        if self._fits >= 0 and guess <= self._fits and not self._doubts():
            return None
        if guess >= self._fails and self._fails < len(self.sizes):  # it would have us try again what has failed
            guess = (self._fits + self._fails) // 2
        return self.sizes[min(max(guess, self._fits + 1), self._fails - 1)]

    def _doubts(self) -> bool:
        """Once in a search, a size that the line excludes by a narrow margin is tried all the same."""
        line, asked = self.line(), self._has_doubted
        self._has_doubted = True
        return not asked and line is not None and line.at(self.sizes[self._fits + 1]) <= (1 + _DOUBT) * self.allowed

    def note(self, size: int, peak: int | None) -> None:
        line, index = self.line(), bisect_left(self.sizes, size)
        fits = peak is not None and peak <= self.allowed
        self.trials.append(Trial(size, peak, line.at(size) if line is not None else None, fits))
        if fits:
            self._is_confirmed = index == self._fits
            self._fits = index
        else:
            self._fails = index
            fitting = [bisect_left(self.sizes, trial.batch) for trial in self.trials if trial.fits]
            self._fits = max((at for at in fitting if at < index), default=-1)

    def line(self) -> _Line | None:
        """Through the largest size that was measured and the largest that is well below it."""
        measured = sorted((trial.batch, trial.peak) for trial in self.trials if trial.peak is not None)
        peaks = list(dict(measured).items())  # of a size that was run twice, the higher
        if len(peaks) < 2:
            return None
        size, peak = peaks[-1]
        below = [pair for pair in peaks[:-1] if pair[0] <= 0.75 * size] or peaks[:1]
        each = (peak - below[-1][1]) / (size - below[-1][0])
        return _Line(peak - each * size, each)

    def result(self) -> BatchSize:
        tried = tuple(self.trials)
        if self._fits < 0:
            return BatchSize(0, None, None, self.allowed, "not even the smallest size fits", tried)
        runs = [trial for trial in tried if trial.batch == self.sizes[self._fits]]
        peak = max(trial.peak for trial in runs if trial.peak is not None)
        return BatchSize(runs[0].batch, peak, runs[0].predicted, self.allowed, self._why(), tried)

    def _guess(self) -> int:
        """Index of the size that the line says is the largest to fit; twice or half the last size without a line."""
        line = self.line()
        if line is not None:
            return bisect_right(self.sizes, line.largest(self.allowed)) - 1
        wanted = 2 * self.sizes[self._fits] if self._fits >= 0 else self.sizes[self._fails] // 2
        return bisect_right(self.sizes, wanted) - 1

    def _why(self) -> str:
        above = self._fits + 1
        if above == len(self.sizes):
            return "the largest size that was asked for"
        size, line = self.sizes[above], self.line()
        failed = [trial for trial in self.trials if trial.batch == size and not trial.fits]
        if failed:
            return f"{size} is {failed[0].outcome}" if failed[0].peak is not None else f"{size} runs out of memory"
        assert line is not None, "a search ends at a size that failed, at the largest, or by a line"
        return f"{size} would need {show(line.at(size))}"


def _show(nbytes: int | None) -> str:
    return "" if nbytes is None else show(nbytes)
