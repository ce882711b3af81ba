"""Make docs/results.md, its figures and study/results/summary.json from the files of results, and from nothing else.

    python study/page.py            write them
    python study/page.py --check    say which of them are not up to date; exit status 1 if one is not

Published figures come from literature.csv and are marked as such.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from drawing import Line, draw
from experiments import Experiment
from measured import markdown, sections
from summaries import Outcome, Summary, mean_curve, summarize_table

from lowtide.app.compare.student import Estimate
from lowtide.reports.text import size

STUDY = Path(__file__).parent
PAGE = Path("docs") / "results.md"
MISSING = "not run yet"
# What is asked of the default on every CIFAR-10 net: points of accuracy, width of the interval, ratios.
CLOSE, NARROW, CONVOLUTIONS, ALL = 0.1, 0.2, 15.0, 12.0
_ASKED_OF = "cifar10_"
_PICTURES = ("cifar10", "imagefolder")
_INTRODUCTION = """# Results

Made by `python study/page.py`; do not edit. Every number comes from the files in [study/results](../study/results),
those about single steps from [benchmarks/results](../benchmarks/results), and those marked *published* from
[study/literature.csv](../study/literature.csv). The tables are what `study/*.toml` say, trained by
`python study/run.py study/*.toml --data DATA`; what [has not been run](#not-run-yet) is listed below.
"""
_GOAL = f"""Asked of `budget` as it comes, on each CIFAR-10 net: mean accuracy within {CLOSE:g} points of that of plain
training, or an interval of the difference that holds zero and is no wider than {NARROW:g}; inputs of convolutions at
least {CONVOLUTIONS:g}x smaller in float32 terms on average over training, all that is saved at least {ALL:g}x."""
_POSTER = """The columns of COMET's table: accuracy of plain and of compressed training, and the inputs of all
convolutions of a batch, in float32 and as held, ours averaged over training. Nets, data and ways of testing differ
(ours shows mirror images too), so the lines stand beside each other and not against each other."""
_LOSSES = """Where accuracy is what a table asks for, the loss on the test part of the same runs, minus that of plain
training with the same seed. It tells how sure an answer was, not only whether it was right. Positive is worse."""
_METHOD = """## How it was measured

- Runs of one seed begin with the same weights and see the same batches, crops and dropout masks; what differs is the
  method, and the order of sums on a GPU, by which even two equal runs drift apart. The interval is Student's over the
  seeds ([compare.md](compare.md)). Accuracies are those after the last epoch, not the best; those of pictures are of
  the mean output for a picture and its mirror image ([train.md](train.md#settings)).
- *Convolutions*: bytes held for the inputs of convolutions, against four bytes a value. *All saved*: bytes held for
  everything that the model saves for backward, against what plain training in float32 saves, counted on fake tensors;
  plain training in 16 bits has about 2x there. Bytes are averaged over the epochs before they are divided; after the
  slash is the last epoch. *Own dtype*: the same averages against what plain training saves in the precision of the run,
  for convolutions and for all.
- *Held* is the mean over training. *Peak* is the largest allocation of the process in the whole run: weights, data,
  optimizer and the first steps included.
- Speeds are given for runs that had the device to themselves; those of runs that shared it say nothing.""".splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    stale = []
    for path, text in make(options.study).items():
        target = options.root / path
        if target.exists() and target.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not options.check:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path} {'is not up to date: python study/page.py' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def make(study: Path) -> dict[str, str]:
    """All files by their path from the root of the repository."""
    results = study / "results"
    tables = [summarize_table(Experiment.read(path), results) for path in sorted(study.glob("*.toml"))]
    figures = {f"study/figures/{table.experiment.name}.svg": _figure(table, results) for table in tables if table.rows}
    parts = [
        _introduction(tables),
        _default(tables),
        _test_losses(tables),
        _poster(tables, study / "literature.csv"),
        *sections(study.parent / "benchmarks" / "results"),
        *(_table(table) for table in tables if table.rows),
        _harm(tables),
        _missing(tables),
        _METHOD,
    ]
    summary = {table.experiment.name: table.as_dict() for table in tables}
    return {
        PAGE.as_posix(): "\n".join(line for part in parts for line in (*part, "")).rstrip() + "\n",
        "study/results/summary.json": json.dumps(summary, indent=1) + "\n",
        **figures,
    }


def _introduction(tables: Sequence[Summary]) -> Iterator[str]:
    yield _INTRODUCTION
    wanted = sum(outcome.variant.seeds for table in tables for outcome in table.outcomes)
    known = [table for table in tables if table.rows]
    names = f" ({'; '.join(table.experiment.title for table in known)})" if known else ""
    yield f"So far: {sum(len(table.rows) for table in known)} of {wanted} runs{names}."


def _default(tables: Sequence[Summary]) -> Iterator[str]:
    yield "## The default against plain training"
    yield ""
    yield _GOAL
    yield ""
    rows = []
    for table in tables:
        outcome, metric = table.default, table.experiment.metric
        if outcome is None or not outcome.rows:
            continue
        verdict = judge(table) if table.experiment.name.startswith(_ASKED_OF) else ""
        cells = [_value(table.base, metric), _value(outcome, metric), *_difference(outcome, metric)]
        cells += [_times(outcome.mean("conv_ratio_fp32_mean")), _times(outcome.mean("ratio_fp32_mean"))]
        rows.append([table.experiment.title, *cells, verdict])
    heads = ["", "plain", "budget", "difference", "95 % interval", "convolutions", "all saved", "what was asked"]
    yield from markdown(heads, rows) if rows else [f"{MISSING.capitalize()}."]


def _test_losses(tables: Sequence[Summary]) -> Iterator[str]:
    yield "## Test losses"
    yield ""
    yield _LOSSES
    yield ""
    rows = []
    for table in tables:
        for outcome in table.outcomes if table.experiment.metric != "loss" else ():
            if outcome.loss is not None:
                cells = [str(outcome.loss.count), f"{outcome.loss.mean:+.4f}", _interval(outcome.loss, "{:+.4f}")]
                rows.append([table.experiment.title, _name(outcome), *cells])
    heads = ["", "method", "pairs", "difference", "95 % interval"]
    yield from markdown(heads, rows) if rows else [f"{MISSING.capitalize()}."]


def judge(table: Summary) -> str:
    """Whether a net has what is asked of the default, what it lacks if not, and how many seeds say so if not all do."""
    outcome = table.default
    if outcome is None or outcome.difference is None or table.base.value is None:
        return MISSING
    difference, lacking = outcome.difference, []
    low, high = difference.low, difference.high
    is_narrow = low is not None and high is not None and low <= 0 <= high and high - low <= NARROW
    if abs(difference.mean) > CLOSE and not is_narrow:
        lacking.append("accuracy")
    if (outcome.mean("conv_ratio_fp32_mean") or 0.0) < CONVOLUTIONS:
        lacking.append("convolutions")
    if (outcome.mean("ratio_fp32_mean") or 0.0) < ALL:
        lacking.append("all saved")
    seeds, wanted = min(len(outcome.rows), len(table.base.rows)), outcome.variant.seeds
    so_far = f" ({seeds} of {wanted} seeds so far)" if seeds < wanted else ""
    return f"missed{so_far}: {', '.join(lacking)}" if lacking else f"met{so_far}"


def _poster(tables: Sequence[Summary], literature: Path) -> Iterator[str]:
    yield "## Beside the published figures"
    yield ""
    yield _POSTER
    yield ""
    rows = []
    for table in tables:
        outcome = table.default
        if outcome is None or not outcome.rows or table.experiment.settings["data"]["name"] not in _PICTURES:
            continue
        raw, held = outcome.mean("conv_raw_fp32"), outcome.mean("conv_held_mean")
        values = [_value(table.base, "accuracy"), _value(outcome, "accuracy")]
        values += [_bytes(raw), _bytes(held), _times(outcome.mean("conv_ratio_fp32_mean"))]
        rows.append(["Lowtide, `budget`", table.experiment.title, *values, "this study"])
    with literature.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            given = [line[name] for name in ("baseline", "compressed", "before", "after")]
            ratio = f"{line['ratio']}x" if line["ratio"] else ""
            cells = [line["method"], f"{line['data']}, {line['net']}", *given, ratio]
            rows.append([*cells, f"*published*: {line['source']}"])
    yield from markdown(["", "", "plain %", "compressed %", "float32", "held", "ratio", "from"], rows)


def _table(table: Summary) -> Iterator[str]:
    experiment, metric = table.experiment, table.experiment.metric
    yield f"## {experiment.title}"
    yield ""
    yield _conditions(table)
    yield ""
    known = [outcome for outcome in table.outcomes if outcome.rows]
    has_speeds = any(outcome.speed is not None for outcome in known)
    rows = []
    for outcome in known:
        cells = [f"{len(outcome.rows)} of {outcome.variant.seeds}", _value(outcome, metric)]
        cells += [
            *_difference(outcome, metric),
            *(_average_and_final(outcome, kind) for kind in ("conv_ratio", "ratio")),
        ]
        own = [_times(outcome.mean(name)) for name in ("conv_ratio_mean", "ratio_mean")]
        cells += [", ".join(filter(None, own)), _bytes(outcome.mean("held_mean")), _bytes(outcome.mean("peak"))]
        rows.append([_name(outcome), *cells, *([_number(outcome.speed, "{:.0f}")] if has_speeds else [])])
    unit = "test loss" if metric == "loss" else "accuracy %"
    heads = ["", "runs", unit, "difference", "95 % interval", "convolutions, fp32", "all saved, fp32", "own dtype"]
    yield from markdown([*heads, "held", "peak", *(["samples/s"] if has_speeds else [])], rows)
    yield ""
    results, name = "../study/results", experiment.name
    yield f"![{metric.capitalize()} and ratios over the epochs, means over the seeds](../study/figures/{name}.svg)"
    yield ""
    yield f"[Curves of every run]({results}/curves/{name}), [layers of seed 0]({results}/layers/{name})."


def _conditions(table: Summary) -> str:
    """Under which conditions the rows were measured; more than one of a kind is said too."""

    def all_of(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in table.rows))

    where = f"{all_of('device')}, torch {all_of('torch')}, revision {all_of('revision')}"
    shared = "; all runs shared the device with others" if all(row["alone"] != "True" for row in table.rows) else ""
    return f"{all_of('epochs')} epochs, batch {all_of('batch')}, {all_of('precision')}; {where}{shared}."


def _harm(tables: Sequence[Summary]) -> Iterator[str]:
    yield "## Where it loses"
    yield ""
    known = [table for table in tables if table.rows]
    lines = [f"- {table.experiment.title}: {line}" for table in tables for line in _losses(table)]
    if known and not any(_harms(table, outcome)[0] > 0 for table in known for outcome in table.outcomes):
        lines.insert(0, "- No interval of a difference lies wholly on the worse side of zero.")
    yield from lines or [f"{MISSING.capitalize()}."]


def _losses(table: Summary) -> Iterator[str]:
    metric = table.experiment.metric
    unit = "of loss" if metric == "loss" else "points"
    form = "{:.4f}" if metric == "loss" else "{:.2f}"
    possible = []
    for outcome in table.outcomes:
        least, most = _harms(table, outcome)
        if least > 0:
            mean, interval = _difference(outcome, metric)
            yield f"{_name(outcome)} differs by {mean} {unit}, {interval}."
        elif most > 0:
            possible.append(f"{form.format(most)} with {_first_name(outcome)}")
    if possible:
        what = "a test loss higher by" if metric == "loss" else "a loss in points of"
        yield f"intervals that hold zero allow for {what} {', '.join(possible)}."
    if table.experiment.name.startswith(_ASKED_OF) and (verdict := judge(table)).startswith("missed"):
        yield f"what is asked of the default is {verdict}."
    yield from _peaks(table)
    for row in table.failures:
        yield f"`{row['method']}`, seed {row['seed']}, failed: {row['error']}"


def _harms(table: Summary, outcome: Outcome) -> tuple[float, float]:
    """The interval of the difference, least harm first: positive is worse, whatever the metric. Zeros without one."""
    difference = outcome.difference
    if difference is None or difference.low is None or difference.high is None:
        return 0.0, 0.0
    low, high = difference.low, difference.high
    return (low, high) if table.experiment.metric == "loss" else (-high, -low)


def _peaks(table: Summary) -> Iterator[str]:
    """Methods that need more memory than plain training at some time of a run, whatever they hold."""
    base = table.base.mean("peak")
    peaks = [(outcome, outcome.mean("peak")) for outcome in table.outcomes[1:]]
    higher = [f"{_bytes(peak)} with {_first_name(outcome)}" for outcome, peak in peaks if base and peak and peak > base]
    if higher:
        yield f"the peak of a run is above plain training's {_bytes(base)}: {', '.join(higher)}."


def _missing(tables: Sequence[Summary]) -> Iterator[str]:
    yield "## Not run yet"
    yield ""
    lines = []
    for table in tables:
        missing = [outcome for outcome in table.outcomes if len(outcome.rows) < outcome.variant.seeds]
        if not table.rows:
            lines.append(f"- {table.experiment.title}: nothing has been run of {', '.join(map(_name, missing))}")
            continue
        lines += [
            f"- {table.experiment.title}: {_name(outcome)}, seeds {_missing_seeds(outcome)}" for outcome in missing
        ]
    yield from lines or ["Nothing: every run of every table has a result."]


def _missing_seeds(outcome: Outcome) -> str:
    there = {int(row["seed"]) for row in outcome.rows}
    return ", ".join(str(seed) for seed in range(outcome.variant.seeds) if seed not in there)


def _figure(table: Summary, results: Path) -> str:
    """Accuracy (or loss), its last third once more, and ratios: means over the seeds."""
    metric = "loss" if table.experiment.metric == "loss" else "accuracy"
    score = 1.0 if metric == "loss" else 100.0

    def lines(column: str, factor: float = 1.0, *, share: float = 1.0) -> list[Line]:
        found = [(o.variant.text, mean_curve(o, results, column)) for o in table.outcomes if o.rows]
        last = max((x for _, points in found for x, _ in points), default=0.0)
        kept = [(name, [(x, factor * y) for x, y in points if x > (1 - share) * last]) for name, points in found]
        return [(name, points) for name, points in kept if points]

    what = "test loss" if metric == "loss" else "test accuracy, %"
    panels = [(what, lines(metric, score)), (f"{what}: the last third", lines(metric, score, share=1 / 3))]
    ratios = (("conv_ratio_fp32", "inputs of convolutions"), ("ratio_fp32", "all that is saved"))
    for column, of_what in ratios:
        if any(outcome.mean(column) for outcome in table.outcomes[1:]):
            panels.append((f"{of_what}: times smaller than in float32", lines(column)))
    return draw(f"{table.experiment.title}: {metric} and ratios over the epochs", panels, form=_short)


def _short(value: float) -> str:
    return f"{value:.4g}"


def _name(outcome: Outcome) -> str:
    """As code; names that mean the same with a sign between them."""
    return " = ".join(f"`{text}`" for text in outcome.variant.text.split(" = "))


def _first_name(outcome: Outcome) -> str:
    return f"`{outcome.variant.text.split(' = ')[0]}`"


def _value(outcome: Outcome, metric: str) -> str:
    if outcome.value is None:
        return MISSING
    return f"{outcome.value.mean:.4f}" if metric == "loss" else f"{outcome.value.mean:.2f}"


def _difference(outcome: Outcome, metric: str) -> tuple[str, str]:
    """The mean difference from plain training and its interval."""
    difference = outcome.difference
    if difference is None:
        return "", ""
    form = "{:+.4f}" if metric == "loss" else "{:+.2f}"
    return form.format(difference.mean), _interval(difference, form)


def _interval(estimate: Estimate, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return "needs two seeds"
    return f"{form.format(estimate.low)} to {form.format(estimate.high)}"


def _average_and_final(outcome: Outcome, kind: str) -> str:
    mean, final = outcome.mean(f"{kind}_fp32_mean"), outcome.mean(f"{kind}_fp32")
    return "" if mean is None or final is None else f"{mean:.1f}x / {final:.1f}x"


def _times(ratio: float | None) -> str:
    return _number(ratio, "{:.1f}x")


def _bytes(nbytes: float | None) -> str:
    return "" if nbytes is None else size(round(nbytes))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--study", type=Path, default=STUDY, metavar="FOLDER", help="default: that of this file")
    parser.add_argument("--root", type=Path, default=STUDY.parent, metavar="FOLDER", help="of what is written")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
