"""The runs of a comparison: which there are, which are done, and how the others are carried out.

A run is the command ``lowtide train --resume`` in a process and a folder of its own: one that is finished gives its
result at once, one that was interrupted continues, and one that fails takes no other along.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lowtide.app.shared.arguments import say
from lowtide.app.shared.mps import shared_gpu
from lowtide.app.shared.rows import now
from lowtide.app.shared.specs import Spec, UsageError
from lowtide.app.train import toml
from lowtide.app.train.config import Config
from lowtide.app.train.recipe import resolve_method
from lowtide.app.train.rundir import write

COLUMNS = (
    *("date", "revision", "device", "torch", "key", "model", "data", "method", "seed", "epochs", "batch", "precision"),
    *("accuracy", "best", "loss", "seconds", "images_per_second", "raw", "held", "ratio", "peak", "static"),
    *("error", "folder"),
)
_PATIENCE = 30.0  # seconds for the checkpoint of a run that was asked to end
_RESULTS = ("accuracy", "best", "loss", "seconds", "images_per_second", "raw", "held", "ratio", "peak", "static")


@dataclass(frozen=True, slots=True)
class Run:
    """One method with one seed. ``method`` is how it was written."""

    method: str
    config: Config

    @property
    def seed(self) -> int:
        return self.config.train.seed

    @property
    def key(self) -> str:
        return self.config.digest()

    @property
    def name(self) -> str:
        """Of its folder: readable, and different for every configuration."""
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.method).strip("-")
        return f"{slug}-{self.seed}-{self.key[:6]}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """What takes about as long: runs that differ in their seeds and the like."""
        return self.config.model.name, self.config.data.name, self.method

    def row(self) -> dict[str, Any]:
        """The columns that are known before it is carried out."""
        config = self.config
        about = {"key": self.key, "model": config.model.name, "data": config.data.name, "method": self.method}
        about |= {name: getattr(config.train, name) for name in ("seed", "epochs", "batch", "precision")}
        return {"date": now(), **about}


def read_method(text: str) -> dict[str, Any]:
    """``"fixed(linear=0.4 std)"`` as settings of a run."""
    spec = Spec.parse(text)
    name, options = resolve_method(spec.name, {**spec.options, **({"coder": spec.short} if spec.short else {})})
    return {"name": name, "options": options}


def plan(config: Config, methods: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> list[Run]:
    """Every method with every seed, seed by seed: the pairs of the first seeds are complete first."""
    return [
        Run(text, config.replace(method=method, train={"seed": seed}))
        for seed in seeds
        for text, method in methods.items()
    ]


@dataclass(slots=True)
class Runner:
    """Carries out runs, some at a time, each in a process of its own.

    ``deadline`` (by ``time.monotonic``) is when those under way are stopped; a run that would not be done by then, as
    earlier ones of its kind tell, is not begun. ``threads`` of a process are its share of the cores unless given.
    Where NVIDIA's MPS is installed, processes on a GPU run side by side (``shared_gpu``).
    ``watch`` gets every line that a run says.
    """

    folder: Path
    jobs: int
    deadline: float = math.inf
    threads: int | None = None
    watch: Callable[[Run, str], None] | None = None
    _children: dict[subprocess.Popen[str], Run] = field(default_factory=dict)
    _shared: set[str] = field(default_factory=set)
    _took: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_stopping: bool = False
    _variables: Mapping[str, str] = field(default_factory=dict)

    def carry_out(self, runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Each run with its row, as they end; one that was stopped or not begun is left out.

        Leaving early stops those under way; each writes a checkpoint first.
        """
        with shared_gpu(self.jobs) as self._variables, ThreadPoolExecutor(self.jobs) as pool:
            timer = self._set_timer()
            # Not as_completed: what has ended before it is called comes in any order.
            ended: SimpleQueue[Future[dict[str, Any] | None]] = SimpleQueue()
            futures = {}
            try:
                for run in runs:
                    future = pool.submit(self._carry_out, run)
                    futures[future] = run
                    future.add_done_callback(ended.put)
                for _ in runs:
                    future = ended.get()
                    row = future.result()
                    if row is not None:
                        yield futures[future], row
            finally:
                timer.cancel()
                self._stop()
                pool.shutdown(wait=True, cancel_futures=True)

    def was_alone(self, run: Run) -> bool:
        """Whether no other run of this runner was under way at any time while this one was."""
        return run.key not in self._shared

    def _carry_out(self, run: Run) -> dict[str, Any] | None:
        if not self._may_begin(run):
            return None
        begin = time.monotonic()
        folder = self.folder / run.name
        settings = self.folder / "settings" / f"{run.name}.toml"
        settings.parent.mkdir(parents=True, exist_ok=True)
        write(settings, toml.dumps(run.config.tables()).encode())
        command = [sys.executable, "-m", "lowtide", "train", "--config", str(settings), "--out", str(folder)]
        status, output, complaint = self._call(run, [*command, "--resume", "--json"])
        row = {**run.row(), "folder": str(folder)}
        if status != 0:
            return None if self._is_stopping else {**row, "error": complaint or f"exit status {status}"}
        with self._lock:
            self._took[run.kind] = max(self._took.get(run.kind, 0.0), time.monotonic() - begin)
        result = json.loads(output)
        about = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        return {
            **row,
            **{name: result[name] for name in _RESULTS},
            **{name: about[name] for name in ("revision", "device", "torch")},
        }

    def _may_begin(self, run: Run) -> bool:
        with self._lock:
            expected = self._took.get(run.kind, min(self._took.values(), default=0.0))
            return not self._is_stopping and time.monotonic() + expected <= self.deadline

    def _call(self, run: Run, command: list[str]) -> tuple[int, str, str]:
        """Exit status, stdout, last line of stderr. All of stderr goes to the log, and is shown if one runs alone."""
        line = ""
        with (self.folder / f"{run.name}.log").open("w", encoding="utf-8") as file:
            with self._lock:
                if self._is_stopping:
                    return 130, "", "interrupted"
                child = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment()
                )
                self._children[child] = run
                if len(self._children) > 1:
                    self._shared.update(other.key for other in self._children.values())
            with child:
                assert child.stdout is not None and child.stderr is not None, "both are pipes"
                for line in child.stderr:
                    file.write(line)
                    if self.watch is not None:
                        self.watch(run, line.rstrip())
                    elif self.jobs == 1:
                        say(f"  {line}", end="")
                output = child.stdout.read()  # one line, which fits into the pipe
            with self._lock:
                del self._children[child]
        return child.returncode, output, line.strip().removeprefix("lowtide: ")

    def _environment(self) -> Mapping[str, str]:
        """Several processes share the cores; threads of one that wait for those of another cost more than they
        bring."""
        if self.threads is not None:
            return {**os.environ, **self._variables, "OMP_NUM_THREADS": str(self.threads)}
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        return os.environ if self.jobs == 1 else {"OMP_NUM_THREADS": threads, **os.environ, **self._variables}

    def _set_timer(self) -> threading.Timer:
        timer = threading.Timer(min(self.deadline - time.monotonic(), threading.TIMEOUT_MAX), self._stop)
        timer.daemon = True
        timer.start()
        return timer

    def _stop(self) -> None:
        """Ask those under way to end, and see that they do."""
        with self._lock:
            self._is_stopping = True
            asked = list(self._children)
            for child in asked:
                child.terminate()
        if asked:
            timer = threading.Timer(_PATIENCE, _kill, [asked])
            timer.daemon = True
            timer.start()


def _kill(children: Iterable[subprocess.Popen[str]]) -> None:
    """Those that have ended are past it."""
    for child in children:
        child.kill()


def read_seeds(text: str) -> list[int]:
    """``"5"`` -> 0 to 4, ``"3-6"`` -> 3 to 6, ``"1,4,9"`` -> these."""
    try:
        if "," in text:
            seeds = [int(part) for part in text.split(",") if part.strip()]
        elif "-" in text:
            first, last = (int(part) for part in text.split("-"))
            seeds = list(range(first, last + 1))
        else:
            seeds = list(range(int(text)))
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise UsageError(f"cannot read {text!r} as seeds; write how many (5), a range (3-6) or a list (1,4,9)")
    return seeds
