"""From the folder of a run to its row, its curve and its layers.

Ratios are bytes over bytes, each averaged over the epochs first: a mean of ratios would let a few good epochs hide
many bad ones. So that runs in 16 bits can be compared with the literature, there are ratios in float32 terms too: above
the line is then what plain training in float32 would save, counted on fake tensors, and for the inputs of convolutions
four bytes a value.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from experiments import Experiment, Variant
from torch import Tensor, nn

from lowtide.app.data import DataSet
from lowtide.app.models import count_channels, find_model
from lowtide.app.plan.dryrun import Conditions, DryRun
from lowtide.app.plan.trace import LEFT, NAMED
from lowtide.app.report.runs import read_run
from lowtide.app.shared.workload import Workload
from lowtide.app.train.config import Config
from lowtide.app.train.rundir import write
from lowtide.app.zoo.tasks import classification_loss, next_token_loss

COLUMNS = (
    *("date", "experiment", "key", "model", "data", "method", "options", "seed", "epochs", "batch", "precision"),
    *("accuracy", "best", "loss", "seconds", "images_per_second", "alone", "peak", "static"),
    *("raw", "held", "held_mean", "ratio", "ratio_mean"),
    *("raw_fp32", "ratio_fp32", "ratio_fp32_mean"),
    *("conv_raw", "conv_held", "conv_held_mean", "conv_ratio", "conv_ratio_mean"),
    *("conv_raw_fp32", "conv_ratio_fp32", "conv_ratio_fp32_mean"),
    *("revision", "torch", "device", "curve", "error"),
)
_COPIED = (
    *("date", "model", "data", "seed", "epochs", "batch", "precision", "accuracy", "best", "loss", "seconds"),
    *("images_per_second", "peak", "static", "revision", "torch", "device", "error"),
)
_CURVE = (
    *("epoch", "accuracy", "loss", "train_loss", "images_per_second", "raw", "held", "raw_fp32", "ratio", "ratio_fp32"),
    *("conv_raw", "conv_held", "conv_raw_fp32", "conv_ratio", "conv_ratio_fp32"),
)
_LAYERS = ("site", "need", "codec", "bound", "raw", "held_mean", "held", "ratio_mean", "ratio", "held_by_epoch")
_ITEMSIZES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # of what convolutions are given, by autocast or without
_CONVOLUTION = re.compile(r":conv\w*\.")


def count_fp32(config: Config, data: DataSet, module: nn.Module, device: torch.device) -> int:
    """Bytes that plain training in float32 saves for backward, by a step on fake tensors at the batch of the run."""
    model = find_model(config.model.name, config.model.options, data)
    sample = partial(_blank, data, count_channels(module))
    score = next_token_loss if data.kind == "tokens" else classification_loss
    workload = Workload(config.model.name, data.kind, data.classes, model.build, sample, score)
    conditions = Conditions(device=device.type, precision="fp32", channels_last=config.train.channels_last)
    saves = DryRun(workload, conditions).trace(config.train.batch).saves
    saved = sum(save.nbytes for save in saves if save.fate in (NAMED, LEFT))
    _, targets = sample(config.train.batch, torch.Generator())  # the batch's own; runs count what the loss saves of it
    return saved + targets.nbytes


def _blank(data: DataSet, channels: int | None, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of the right shapes."""
    targets = torch.zeros(batch, dtype=torch.int64)
    if data.kind == "image":
        _, *rest = data.shape
        return torch.zeros(batch, channels or data.shape[0], *rest), targets
    tokens = torch.zeros(batch, data.length, dtype=torch.int64)
    return tokens, tokens if data.kind == "tokens" else targets


def make_row(
    experiment: Experiment, variant: Variant, row: Mapping[str, Any], curve: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The row of a run; ``row`` is what the runner says of it, and ``curve`` is empty if it failed."""
    made = {name: row.get(name) for name in _COPIED}
    made |= {"experiment": experiment.name, "key": experiment.key}
    made |= {"method": variant.name, "options": variant.written_options}
    for prefix in ("", "conv_"):
        lines = [line for line in curve if line[f"{prefix}held"]]
        if not lines:
            continue
        raw, held, in_fp32 = ([line[f"{prefix}{name}"] for line in lines] for name in ("raw", "held", "raw_fp32"))
        made |= {f"{prefix}raw": raw[-1], f"{prefix}held": held[-1], f"{prefix}held_mean": round(fmean(held))}
        made |= {f"{prefix}ratio": raw[-1] / held[-1], f"{prefix}ratio_mean": fmean(raw) / fmean(held)}
        made |= {f"{prefix}raw_fp32": in_fp32[-1], f"{prefix}ratio_fp32": in_fp32[-1] / held[-1]}
        made |= {f"{prefix}ratio_fp32_mean": fmean(in_fp32) / fmean(held)}
    return made


def read_curve(folder: Path, precision: str, saved_fp32: int) -> list[dict[str, Any]]:
    """One line for each epoch of a run. ``saved_fp32`` is from ``count_fp32``."""
    run = read_run(folder)
    reports = {report["step"]: report["sites"] for report in run.sites}
    lines = []
    for evaluation in run.evals:
        steps = [line for line in run.steps if line["epoch"] == evaluation["epoch"]]
        line = {name: evaluation[name] for name in ("epoch", "accuracy", "loss")}
        line["train_loss"] = fmean(step["loss"] for step in steps)
        line["images_per_second"] = fmean(step["images_per_second"] for step in steps)
        raw, held = (round(fmean(step[name] for step in steps)) for name in ("raw_nbytes", "held_nbytes"))
        line |= _ratios("", raw, held, saved_fp32)
        inputs = [site for site in reports.get(evaluation["step"], ()) if _CONVOLUTION.search(site["name"])]
        raw, held = (sum(site[name] for site in inputs) for name in ("raw_nbytes", "held_nbytes"))
        line |= _ratios("conv_", raw, held, raw * 4 // _ITEMSIZES[precision])
        lines.append(line)
    return lines


def _ratios(prefix: str, raw: int, held: int, in_fp32: int) -> dict[str, Any]:
    """Bytes and ratios of an epoch; empty where nothing was saved."""
    values = (raw, held, in_fp32, raw / held, in_fp32 / held) if held else (None,) * 5
    names = (f"{prefix}{name}" for name in ("raw", "held", "raw_fp32", "ratio", "ratio_fp32"))
    return dict(zip(names, values, strict=True))


def read_layers(folder: Path) -> list[dict[str, Any]]:
    """One line for each place of the model: what it holds at the end, on average over the epochs, and at each."""
    reports = [report["sites"] for report in read_run(folder).sites]
    held: dict[str, list[int]] = {}
    for sites in reports:
        for site in sites:
            held.setdefault(site["name"], []).append(site["held_nbytes"])
    return [
        {
            "site": site["name"],
            **{name: site[name] for name in ("need", "codec", "bound")},
            "raw": site["raw_nbytes"],
            "held_mean": round(fmean(held[site["name"]])),
            "held": site["held_nbytes"],
            "ratio_mean": _over(site["raw_nbytes"], fmean(held[site["name"]])),
            "ratio": _over(site["raw_nbytes"], site["held_nbytes"]),
            "held_by_epoch": " ".join(map(str, held[site["name"]])),
        }
        for site in (reports[-1] if reports else ())
        if site["raw_nbytes"] or site["held_nbytes"]
    ]


def _over(raw: float, held: float) -> float | None:
    return raw / held if raw and held else None


def name_file(experiment: Experiment, variant: Variant, seed: int) -> str:
    """Of a run's curve and layers: readable, and another one for other settings or options, whatever the default is."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", variant.text.split(" = ")[0]).strip("-")
    digest = hashlib.sha256(f"{experiment.key} {variant.name} {variant.written_options}".encode()).hexdigest()
    return f"{slug}-{seed}-{digest[:6]}.csv"


def write_curve(path: Path, curve: Sequence[Mapping[str, Any]]) -> None:
    _write(path, _CURVE, curve)


def write_layers(path: Path, layers: Sequence[Mapping[str, Any]]) -> None:
    _write(path, _LAYERS, layers)


def _write(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row[column]) for column in columns])
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, text.getvalue().encode())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file of results, line by line: half a row, of a process that was killed, takes no other along."""
    if not path.exists():
        return []
    cells = [next(csv.reader([line]), []) for line in path.read_text(encoding="utf-8").splitlines()]
    columns = cells[0] if cells else []
    return [dict(zip(columns, row, strict=True)) for row in cells[1:] if len(row) == len(columns)]
