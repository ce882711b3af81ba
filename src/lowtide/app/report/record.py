"""The report as JSON: the figures of each run and everything that they were made of, under stable keys."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lowtide.app.report import figures
from lowtide.app.report.runs import Run

VERSION = 1


def render_json(runs: Sequence[Run]) -> str:
    """The whole report; what is not a number in JSON (NaN, inf) is null."""
    record = {
        "version": VERSION,
        "runs": [_run(run, item) for run, item in zip(runs, figures.summarise(runs), strict=True)],
    }
    return json.dumps(_finite(record), indent=2, allow_nan=False) + "\n"


def _run(run: Run, summary: figures.Summary) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "notes": list(run.notes),
        "summary": asdict(summary),
        "config": run.config,
        "environment": run.environment,
        "result": run.result,
        "evals": run.evals,
        "steps": run.steps,
        "memory": run.memory,
        "needs": figures.shares(run.layers),
        "left_alone": figures.left_alone(run.layers),
        "events": run.events,
        "sites": run.sites,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)
