"""What else a training step is asked for: memory, waits on the host, a profile."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.app.bench import timing
from lowtide.app.shared.rows import explain
from lowtide.app.shared.workload import Task
from lowtide.graphs.step import GraphStep
from lowtide.session import Session

_PACKAGE = Path(__file__).parents[2]
_PROFILE_ROWS = 30
_MOST_TRIES = 16  # steps, one of which is a replay: a few before each capture are not


def measure(task: Task, session: Session | None) -> dict[str, Any]:
    """Memory of a step, in the way that suits it."""
    if isinstance(task.graphed, GraphStep):
        return measure_graph(task, task.graphed, session)
    return measure_memory(task, session)


@contextlib.contextmanager
def replays(task: Task) -> Iterator[dict[str, int]]:
    """Of a task that is a graph: how many of the steps taken inside are replayed, and how many did not fit."""
    counts: dict[str, int] = {}
    graph = task.graphed
    if not isinstance(graph, GraphStep):
        yield counts
        return
    before = graph.replays, len(graph.overflows)
    yield counts
    counts |= {"replays": graph.replays - before[0], "overflows": len(graph.overflows) - before[1]}


def measure_memory(task: Task, session: Session | None) -> dict[str, Any]:
    """One step: bytes held between forward and backward, and at the peak, above what is there without a step.

    The static state is parameters, buffers, the optimizer's state and the batch; gradients are not in it. ``held`` is
    counted when the device has computed the loss and nothing but the loss is referred to. The allocator's figures need
    a GPU.
    """
    row: dict[str, Any] = {}
    on_gpu = task.device.type == "cuda"
    task.optimizer.zero_grad(set_to_none=True)
    timing.synchronize(task.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(task.device)
        before = _read_allocator(task, "current")
        row["static"] = before[0]
    loss = task.loss()
    if on_gpu:
        timing.synchronize(task.device)
        if session is not None:
            session.report()  # lets go of tensors whose encoders have reported by now
        held = _read_allocator(task, "current")
        row |= {"held": held[0] - before[0], "held_requested": held[1] - before[1]}
    if session is not None:
        row |= {"ledger_raw": session.ledger.raw, "ledger_held": session.ledger.held}
    loss.backward()
    task.optimizer.step()
    if session is not None:
        row["saves"] = sum(entry.saves for entry in session.ledger.sites.values())
    if on_gpu:
        peak = _read_allocator(task, "peak")
        row |= {"peak": peak[0] - before[0], "peak_requested": peak[1] - before[1]}
    return row


def measure_graph(task: Task, graph: GraphStep, session: Session | None) -> dict[str, Any]:
    """The same where forward and backward are one graph and nobody can look between them.

    The ledger tells what the captured step holds. At the peak there is all that belongs to the graph, in use or not,
    and what the rest of the step allocates beside it.
    """
    row: dict[str, Any] = {}
    if session is not None:
        sites = session.ledger.sites.values()
        raw, held = sum(entry.raw_nbytes for entry in sites), sum(entry.held_nbytes for entry in sites)
        row |= {"ledger_raw": raw, "ledger_held": held, "saves": sum(entry.saves for entry in sites)}
    for _ in range(_MOST_TRIES if task.device.type == "cuda" else 0):
        nbytes, replays, captures = graph.nbytes, graph.replays, graph.captures
        task.optimizer.zero_grad(set_to_none=True)
        timing.synchronize(task.device)
        torch.cuda.reset_peak_memory_stats(task.device)
        before = _read_allocator(task, "current")
        task.step()
        timing.synchronize(task.device)
        if nbytes and graph.replays > replays and graph.captures == captures:  # a capture has tensors of its own
            return row | {"peak": _read_allocator(task, "peak")[0] - before[0] + nbytes}
    return row


def _read_allocator(task: Task, which: str) -> tuple[int, int]:
    """Bytes of the allocator's blocks, and bytes that were asked for."""
    stats = torch.cuda.memory_stats(task.device)
    return stats[f"allocated_bytes.all.{which}"], stats[f"requested_bytes.all.{which}"]


def check_waits(task: Task) -> str:
    """Whether a step waits for the device anywhere: "ok", or where it does first."""
    if task.device.type != "cuda":
        return "no GPU"
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        task.step()
    except RuntimeError as error:
        return f"failed: {explain(error)}{_place(error)}"
    finally:
        torch.cuda.set_sync_debug_mode(before)
        timing.synchronize(task.device)
    return "ok"


def _place(error: BaseException) -> str:
    """The innermost line of Lowtide's that the error went through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(_PACKAGE):
            return f" at {Path(frame.filename).relative_to(_PACKAGE)}:{frame.lineno}"
    return ""


def write_profile(task: Task, path: Path, title: str) -> None:
    """Append the ops of one step that take most time on the device."""
    on_gpu = task.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        task.step()
        timing.synchronize(task.device)
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    text = profiler.key_averages().table(sort_by=order, row_limit=_PROFILE_ROWS)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{title}\n{text}\n\n")
