"""Run folders with known contents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
SITES = (
    ("bn1:native_batch_norm.input", "values", "sz", "0.4 std", 8 * MIB, MIB),
    ("conv2:convolution.input", "values", "sz", "0.4 std", 4 * MIB, MIB // 2),
    ("relu:relu.result", "mask", "in sz", "", 0, 0),
    ("pool:max_pool2d_with_indices.result1", "window", "window_index", "", 2 * MIB, MIB // 16),
    ("pool:max_pool2d_with_indices.self", "metadata", "shape", "", MIB, 0),
    ("lstm:mkldnn_rnn_layer.input", "exact", "kept", "", MIB, MIB),
)


def site_rows(scale: float = 1.0) -> list[dict[str, Any]]:
    """Rows of a session's report; ``scale`` is applied to what is held."""
    rows = [
        {
            "name": name,
            "module": "Module",
            "need": need,
            "codec": codec,
            "reason": "recurrent op" if codec == "kept" else "why",
            "bound": bound,
            "saves": 1,
            "raw_nbytes": raw,
            "held_nbytes": round(held * scale) if codec != "kept" else held,
        }
        for name, need, codec, bound, raw, held in SITES
    ]
    small = {"name": "bn1 (smaller than min_size)", "module": "BatchNorm2d", "need": "exact", "codec": "kept"}
    return [*rows, {**small, "reason": "smaller than min_size", "bound": "", "saves": 2, "raw_nbytes": 64,
                    "held_nbytes": 64}]  # fmt: skip


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run of three epochs of ten steps; ``changes`` are made to its result, and a file named in ``without`` is not
    written."""

    def make(
        name: str = "plain",
        *,
        method: str = "plain",
        accuracy: float = 0.9,
        ratio: float | None = None,
        without: Iterable[str] = (),
        **changes: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        held = 16 * MIB if ratio is None else round(16 * MIB / ratio)
        steps = [
            {
                "kind": "step",
                "step": step,
                "epoch": (step - 1) // 10 + 1,
                "loss": 2.0 / step,
                "lr": 0.1,
                "images_per_second": 100.0 + step,
                "raw_nbytes": 16 * MIB,
                "held_nbytes": held,
                "ratio": 16 * MIB / held,
                "peak_nbytes": held + 8 * MIB,
            }
            for step in range(1, 31)
        ]
        evals = [
            {"kind": "eval", "step": 10 * epoch, "epoch": epoch, "accuracy": accuracy - 0.1 * (3 - epoch),
             "loss": 1 / epoch}
            for epoch in (1, 2, 3)
        ]  # fmt: skip
        write_lines(folder / "metrics.jsonl", [*steps, *evals])
        memory = [
            *({"phase": "forward", "at": at, "label": f"layer{at}", "allocated": at * MIB} for at in range(4)),
            {"phase": "backward", "at": 4, "label": "layer3", "allocated": 5 * MIB},
            {"phase": "backward", "at": 5, "label": "layer0", "allocated": MIB},
        ]
        write_lines(folder / "memory.jsonl", memory)
        if method != "plain":
            records = [{"step": 10 * epoch, "sites": site_rows(1 + epoch / 10)} for epoch in (1, 2, 3)]
            write_lines(folder / "sites.jsonl", records)
        (folder / "config.toml").write_text(f'[model]\nname = "resnet18"\n[method]\nname = "{method}"\n', "utf-8")
        (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "device": "cpu"}), "utf-8")
        result = {"accuracy": accuracy, "best": accuracy + 0.01, "seconds": 12.5, "held": held,
                  "peak": held + 8 * MIB, "ratio": ratio, "method": method, "seed": 0}  # fmt: skip
        (folder / "result.json").write_text(json.dumps({**result, **changes}), "utf-8")
        for file in without:
            (folder / file).unlink()
        return folder

    return make
