"""How often would a graph's payloads not fit, with a slack for each, and with a reserve for all of them?

    PYTHONPATH=src python benchmarks/rooms.py resnet18 --set width=16 --method "fixed(linear=1.0 std,norm=1.0 std)"
    PYTHONPATH=src python benchmarks/rooms.py vit_b_16 --set width=96 --set depth=4 --set heads=3 \\
        --set image_size=32 --set patch_size=4 --method "fixed(linear=0.4 std,norm=0.4 std,attention=0.4 std)"

The net trains as ``lowtide train`` does (docs/train.md), eagerly and on any device, a new batch in every step. Bounds
and tables of the coder ``rans`` are measured when a graph would measure them (docs/graphs.md) and stay as they are in
between, so that payloads have the sizes that they have in replays. From these sizes follows what each way of making
room would have done; a step that does not fit counts as one that is repeated, and the next graph is made with the room
that follows. One row for each way is appended to a CSV file:
- ``slack``: a slack for each site, as payloads in one piece have it (``graphs/rooms.py``);
- ``reserve``: a 64th for each payload, and a reserve in common.
``spare`` is the room beyond what payloads needed, as a share of that, the mean over the replays.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lowtide.app import data, zoo
from lowtide.app.shared import arguments, specs
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import run_script
from lowtide.app.shared.variants import Variant
from lowtide.app.train.config import Config
from lowtide.app.train.prepare import understand
from lowtide.app.train.trainer import Trainer, settings
from lowtide.graphs.rooms import OWN, Reserve, Rooms
from lowtide.graphs.schedule import Mode, Schedule
from lowtide.reports.text import table

COLUMNS = (
    *ENVIRONMENT, "model", "options", "data", "batch", "precision", "method", "seed", "steps",
    *("way", "slack", "sites", "replays", "overflows", "spare", "most_of_a_site", "most_of_all"),
)  # fmt: skip
WARMUP, REFRESH = 12, 256  # as of Session.graph
Sizes = Mapping[str, float]  # of the payloads of a site, tables included; those of a pair count half at either site


class Way(Protocol):
    """Of making room, told what is needed."""

    @property
    def room(self) -> float:
        """All of it."""
        ...

    def capture(self, last: Sizes) -> None:
        """Another graph, where an eager step took ``last``."""
        ...

    def replay(self, needed: Sizes) -> bool:
        """Whether it fitted; if not, room has been made wider."""
        ...

    def narrow(self) -> None:
        """All replays of the graph have fitted."""
        ...


@dataclass
class Slack:
    """A slack for each site."""

    rooms: Rooms
    made: dict[str, float] = field(default_factory=dict)

    @property
    def room(self) -> float:
        return sum(self.made.values())

    def capture(self, last: Sizes) -> None:
        self.rooms.begin()
        self.made = {site: self.rooms.of(site).make(words) for site, words in last.items()}

    def replay(self, needed: Sizes) -> bool:
        fits = True
        for site, words in needed.items():
            room, made = self.rooms.of(site), self.made[site]
            room.note(words)
            if words > made:
                room.widen(words / made - 1)
                fits = False
        return fits

    def narrow(self) -> None:
        self.rooms.narrow()


@dataclass
class InCommon:
    """Hardly any slack, and a reserve for all."""

    reserve: Reserve
    made: dict[str, float] = field(default_factory=dict)
    words: float = 0.0

    @property
    def room(self) -> float:
        return sum(self.made.values()) + self.words

    def capture(self, last: Sizes) -> None:
        self.made = {site: words * (1 + OWN) for site, words in last.items()}
        self.words = self.reserve.words(sum(last.values()))

    def replay(self, needed: Sizes) -> bool:
        short = sum(max(words - self.made[site], 0.0) for site, words in needed.items())
        if short:
            self.reserve.note(short / sum(self.made.values()))
        if short > self.words:
            self.reserve.widen()
        return short <= self.words

    def narrow(self) -> None:
        self.reserve.narrow()


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_data(parser, model="resnet18", batch=64, steps=200, example="size=32")
    add("--method", default="fixed", help="what holds the tensors (default: %(default)s)")
    add("--precision", default="bf16", help="fp32, tf32 or bf16 (default: %(default)s)")
    add("--slack", type=float, default=1 / 16, help="as of Session.graph (default: %(default)s)")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/rooms.csv")


def prepare(options: argparse.Namespace, device: torch.device) -> Trainer:
    """A run of as many whole epochs as have ``--steps`` steps."""
    name, path = data.parse(options.data)
    variant = Variant.parse(options.method)
    tiny = zoo.describe(options.model).tiny if options.tiny else {}
    config = Config.read({
        "model": {"name": options.model, "options": {**tiny, **specs.parse_options(options.set)}},
        "data": {"name": name, "path": path, "options": specs.parse_options(options.data_set)},
        "method": {"name": variant.method, "options": {**variant.options, "coder": "rans"}},
        "train": {"batch": options.batch, "seed": options.seed, "precision": options.precision},
    })  # fmt: skip
    config, found, model = understand(config)
    epochs = math.ceil(options.steps / max(found.train.per_epoch // options.batch, 1))
    return Trainer(config.replace(train={"epochs": epochs}), found, model, device)


def train(trainer: Trainer, steps: int) -> Iterator[tuple[Mode, Sizes]]:
    """What payloads took, step by step, and what a graph would have done in that step."""
    assert trainer.session is not None
    pipeline, schedule = trainer.session._pipeline, Schedule(WARMUP, REFRESH)
    for number in range(steps):
        mode = schedule.next()
        pipeline.sites.due = {Mode.EAGER: None, Mode.MEASURE: True}.get(mode, False)
        loss = trainer.step(number)
        pipeline.finish()
        if mode is Mode.CAPTURE:
            schedule.captured()
        if mode in (Mode.CAPTURE, Mode.REPLAY):
            schedule.replayed(gets_old=True)
        if (number + 1) % 50 == 0:
            arguments.say(f"step {number + 1}: loss {float(loss):.4f}")
        entries = trainer.session.ledger.sites.items()
        yield mode, {name: entry.held_nbytes for name, entry in entries if entry.codec == "sz" and entry.held_nbytes}


def judge(way: Way, trace: list[tuple[Mode, Sizes]]) -> dict[str, Any]:
    """What ``way`` would have done."""
    replays = overflows = 0
    spare, last = [], {}
    for mode, sizes in trace:
        if mode is Mode.CAPTURE:
            if replays:
                way.narrow()
            way.capture(last)
        if mode not in (Mode.CAPTURE, Mode.REPLAY):
            last = sizes
            continue
        replays += 1
        spare.append(way.room / sum(sizes.values()) - 1)
        if not way.replay(sizes):
            overflows += 1
            way.capture(sizes)
    return {"replays": replays, "overflows": overflows, "spare": statistics.mean(spare)}


def growth(trace: list[tuple[Mode, Sizes]]) -> tuple[float, float]:
    """The most that the payload of a site, and all together, needed beyond the last eager step before a graph."""
    single, together, last, before = 0.0, 0.0, {}, {}
    for mode, sizes in trace:
        if mode is Mode.CAPTURE:
            before = last
        if mode in (Mode.CAPTURE, Mode.REPLAY):
            single = max(single, *(words / before[site] - 1 for site, words in sizes.items()))
            together = max(together, sum(sizes.values()) / sum(before.values()) - 1)
        else:
            last = sizes
    return single, together


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments.require_positive(options, "batch", "steps")
    device = arguments.find_device(options)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    trainer = prepare(options, device)
    shared = {**describe_environment(device, options.revision), "date": now()}
    shared |= {name: getattr(options, name) for name in ("model", "batch", "precision", "method", "seed", "steps")}
    shared |= {"options": " ".join([*(["tiny"] if options.tiny else []), *options.set]), "slack": options.slack}
    shared["data"] = " ".join([options.data.partition(":")[0], *options.data_set])
    with settings(trainer.config, device):
        trace = list(train(trainer, options.steps))
    trainer.close()
    single, together = growth(trace)
    shared |= {"sites": len(trace[-1][1]), "most_of_a_site": single, "most_of_all": together}
    ways: dict[str, Way] = {"slack": Slack(Rooms(options.slack)), "reserve": InCommon(Reserve(options.slack))}
    rows = []
    for name, way in ways.items():
        row = {**shared, "way": name, **judge(way, trace)}
        out.append(row)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> list[str]:
    row = rows[0]
    cells = [(row["way"], str(row["replays"]), str(row["overflows"]), f"{100 * row['spare']:.1f} %") for row in rows]
    lines = table(("room", "replays", "did not fit", "spare"), cells)
    beyond = f"{row['sites']} sites; one needed up to {100 * row['most_of_a_site']:.0f} % more than before its graph, "
    return [*lines, beyond + f"all together up to {100 * row['most_of_all']:.0f} %"]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
