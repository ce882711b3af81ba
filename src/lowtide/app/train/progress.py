"""What a person sees while a model trains: one line that is rewritten on a terminal, else a line for every interval."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from lowtide.reports.text import size


class Progress:
    """Writes to stderr, so that stdout has the result alone."""

    def __init__(self, *, epochs: int, steps: int, unit: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._epochs, self._steps, self._unit = epochs, steps, unit
        self._is_open = False

    def step(self, values: Mapping[str, Any]) -> None:
        """One log interval."""
        done, total = values["step"], self._epochs * self._steps
        epoch = f"{(done - 1) // self._steps + 1}/{self._epochs}"
        left = clock((total - done) * values["seconds_per_step"])
        speed, held, peak = f"{values['images_per_second']:.0f}", values.get("held_nbytes"), values.get("peak_nbytes")
        long = [f"epoch {epoch}", f"step {done}/{total}", f"loss {values['loss']:.3f}", f"{speed} {self._unit}/s"]
        short = [epoch, f"{done}/{total}", long[2], f"{speed}/s"]
        if held is not None:
            long.append(f"held {size(held)} ({values['ratio']:.1f}x less)")
            short.append(f"held {size(held)} ({values['ratio']:.1f}x)")
        if peak is not None:
            long.append(f"peak {size(peak)}")
            short.append(f"peak {size(peak)}")
        self._show("  ".join([*long, f"{left} left"]), "  ".join([*short, left]))

    def evaluation(self, epoch: int, accuracy: float, loss: float, seconds: float) -> None:
        """After an epoch: a line that stays."""
        text = f"epoch {epoch}/{self._epochs}  test accuracy {100 * accuracy:.2f} %  test loss {loss:.4f}"
        self.say(f"{text}  {clock(seconds)}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.end()
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """Leave the line that is being rewritten."""
        if self._is_open:
            self._stream.write("\n")
            self._is_open = False

    def _show(self, long: str, short: str) -> None:
        if not self._is_terminal:
            print(long, file=self._stream, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        text = long if len(long) <= width else short
        self._stream.write(f"\r{text[:width].ljust(width)}")
        self._stream.flush()
        self._is_open = True


def clock(seconds: float) -> str:
    """75 -> 1:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
