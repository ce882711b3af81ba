"""A run from its first step, or from its last checkpoint, to its result.

What happens after a step, in this order: log, evaluate, checkpoint, stop if a signal has asked for it. Lines are
written before the checkpoint that covers them, and a run that is resumed removes the lines after its checkpoint.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any, Self

import torch

from lowtide.app.timeline import Timeline
from lowtide.app.train import checkpoints
from lowtide.app.train.advice import advise, explained
from lowtide.app.train.checkpoints import CheckpointError
from lowtide.app.train.metrics import Metrics, read_lines
from lowtide.app.train.progress import Progress
from lowtide.app.train.rundir import RunFolder, write_json
from lowtide.app.train.trainer import Trainer
from lowtide.errors import LowtideError

_FOLLOWED = 5  # the step of an epoch whose memory is followed: no statistics are refreshed in it (dataflow.md, rule 14)


class DivergedError(LowtideError):
    """The loss is no longer a number."""


class Stopped(Exception):
    """A signal asked the run to stop; its last step is in a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped after step {step}; a checkpoint is written, --resume continues from it")
        self.status = 128 + number


class Signals:
    """Notes Ctrl-C and SIGTERM for the end of the step; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


class Loop:
    """The steps of one run in its folder."""

    def __init__(self, trainer: Trainer, folder: RunFolder, progress: Progress) -> None:
        self._trainer, self._folder, self._progress = trainer, folder, progress
        self._digest = trainer.config.digest()
        self._step, self._best, self._accuracy, self._test_loss = 0, 0.0, 0.0, math.nan
        self._when = "before the first step"  # for a message, should memory run out
        self._losses = torch.zeros((), device=trainer.device)  # since the last log line, added up on the device
        self._counted = 0
        self._seconds = 0.0  # of the run, until this process began
        self._begin = self._lap = time.perf_counter()

    def run(self) -> dict[str, Any]:
        """Train to the end; the result, which is written too."""
        with explained(self._advise):
            self._train()
        result = self._describe()
        write_json(self._folder / "result.json", result)
        return result

    def _train(self) -> None:
        self._resume()
        metrics = Metrics(self._folder, step=self._step)
        self._trainer.meter.begin()
        try:
            with Signals() as signals:
                while self._step < self._trainer.steps:
                    self._advance(metrics)
                    if self._is_checkpoint_due() or signals.received:
                        self._aside(self._save)
                    if signals.received:
                        raise Stopped(signals.received, self._step)
        finally:
            metrics.close()
            self._progress.end()

    def _advance(self, metrics: Metrics) -> None:
        """One step and what is due after it."""
        trainer = self._trainer
        timeline = Timeline(trainer.model) if self._is_followed() else None
        self._when = f"in step {self._step + 1}"
        self._losses += trainer.step(self._step, timeline)
        self._step += 1
        self._counted += 1
        ends_epoch = self._step % trainer.steps_per_epoch == 0
        if timeline is not None:
            metrics.log_memory(self._step, timeline.thinned())
        if self._step % trainer.config.run.log_every == 0 or ends_epoch:
            self._log(metrics)
        if ends_epoch:
            self._aside(lambda: self._evaluate(metrics))

    def _log(self, metrics: Metrics) -> None:
        loss = float(self._losses) / self._counted
        now = time.perf_counter()
        passed = now - self._lap
        batch = self._trainer.config.train.batch
        values = {
            "step": self._step,
            "epoch": (self._step - 1) // self._trainer.steps_per_epoch + 1,
            "loss": loss,
            "lr": self._trainer.rate(self._step - 1),
            "images_per_second": batch * self._counted / passed,
            **self._trainer.meter.read(),
            "seconds": self._elapsed(),
        }
        metrics.log_step(**values)
        self._progress.step({**values, "seconds_per_step": passed / self._counted})
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {loss} at step {self._step}: training has diverged. A lower --lr, a longer --warmup, "
                "--clip or smaller bounds may help"
            )
        self._losses.zero_()
        self._counted, self._lap = 0, now

    def _evaluate(self, metrics: Metrics) -> None:
        self._when = f"in the evaluation after step {self._step}"
        self._accuracy, self._test_loss = self._trainer.evaluate()
        self._best = max(self._best, self._accuracy)
        epoch = self._step // self._trainer.steps_per_epoch
        metrics.log_evaluation(step=self._step, epoch=epoch, accuracy=self._accuracy, loss=self._test_loss)
        if self._trainer.session is not None:
            metrics.log_report(self._step, self._trainer.session.report().to_dict())
        self._progress.evaluation(epoch, self._accuracy, self._test_loss, self._elapsed())

    def _is_followed(self) -> bool:
        """One step of the first epoch and one of the last: there is something to see early, and the end counts."""
        epoch, place = divmod(self._step, self._trainer.steps_per_epoch)
        is_place = place == min(_FOLLOWED, self._trainer.steps_per_epoch - 1)
        return is_place and epoch in (0, self._trainer.config.train.epochs - 1)

    def _is_checkpoint_due(self) -> bool:
        settings = self._trainer.config.run
        if not settings.checkpoints:
            return False
        every = settings.checkpoint_every
        return self._step % self._trainer.steps_per_epoch == 0 or bool(every and self._step % every == 0)

    def _save(self) -> None:
        self._when = f"in the checkpoint after step {self._step}"
        state = {
            "digest": self._digest,
            "seconds": self._elapsed(),
            "lap": time.perf_counter() - self._lap,
            "best": self._best,
            "accuracy": self._accuracy,
            "test_loss": self._test_loss,
            "losses": float(self._losses),
            "counted": self._counted,
            "meter": self._trainer.meter.state_dict(),
            **self._trainer.state_dict(),
        }
        checkpoints.save(self._folder.checkpoints, self._step, state)

    def _resume(self) -> None:
        state = checkpoints.load_newest(self._folder.checkpoints, self._progress.say)
        self._begin = self._lap = time.perf_counter()
        if state is None:
            return
        if state["digest"] != self._digest:
            raise CheckpointError(f"{self._folder.checkpoints} belongs to another configuration than config.toml")
        self._trainer.load_state_dict(state)
        self._step, self._counted, self._seconds = state["step"], state["counted"], state["seconds"]
        self._best, self._accuracy, self._test_loss = state["best"], state["accuracy"], state["test_loss"]
        self._losses.fill_(state["losses"])
        self._lap -= state["lap"]
        self._trainer.meter.load_state_dict(state["meter"])
        self._progress.say(f"resuming after step {self._step} of {self._trainer.steps}")

    def _aside(self, work: Callable[[], None]) -> None:
        """Do something that is not training: it does not count as time of steps."""
        begin = time.perf_counter()
        work()
        self._lap += time.perf_counter() - begin

    def _elapsed(self) -> float:
        return self._seconds + time.perf_counter() - self._begin

    def _advise(self) -> str:
        trainer = self._trainer
        return advise(trainer.config, self._when, meter=trainer.meter, session=trainer.session, device=trainer.device)

    def _describe(self) -> dict[str, Any]:
        trainer, config, meter = self._trainer, self._trainer.config, self._trainer.meter
        lines = read_lines(self._folder, "metrics.jsonl")
        return {
            "accuracy": self._accuracy,
            "best": self._best,
            "loss": self._test_loss,
            "seconds": self._elapsed(),
            # The median: first steps compile and choose kernels, two others are followed op by op.
            "images_per_second": median(row["images_per_second"] for row in lines if row["kind"] == "step"),
            "raw": meter.raw,
            "held": meter.held,
            "ratio": meter.ratio,
            "peak": meter.peak,
            "static": meter.static,
            "method": config.method.name,
            "options": config.method.options,
            "model": config.model.name,
            "data": config.data.name,
            "seed": config.train.seed,
            "epochs": config.train.epochs,
            "steps": trainer.steps,
            "digest": self._digest,
        }
