"""Would prediction from neighbours, or tables for groups of channels, make payloads of ``sz`` smaller?

    PYTHONPATH=src python benchmarks/prediction.py resnet18 --data cifar10:PATH --batch 64 --steps 300,900
    PYTHONPATH=src python benchmarks/prediction.py resnet18 --data imagefolder:PATH --batch 32 --steps 300,900

The net trains as ``lowtide train`` does, plainly (docs/train.md). After so many steps, what its convolutions, linear
layers and norms read is taken, each tensor once and the model's own input not at all, and turned into codes as ``sz``
does: under bounds that are multiples of a standard deviation (of a tensor's non-zeros; for norms that of a channel or a
row), with dither or nearest rounding, exact zeros as a symbol of their own where there are many. Bits a value of
- ``plain``: the codes as they are;
- ``row``, ``plane``: what is left of a code after prediction (coding/lorenzo.py) from its left neighbour, or from the
  left, upper and upper left one. Exact zeros keep their symbol; to their neighbours they are the code 0;
- ``centred``: codes counted from the whole step nearest to their channel's mean, as norm inputs under bounds per
  channel are already. Where zero has a symbol of its own codes stay as they are;
- ``groups4``, ``groups8``: the codes, with a table for each of 4 or 8 groups of channels. Channels are sorted by their
  entropy and cut into groups, then move, a few times, to the table that costs them least. For the coder, where
  channels are neighbours in memory, the four that a lane loads belong together;
each of them twice: ``entropy_``, of symbols one by one, and ``coded_``, what the coder ``rans`` makes of them. There
neighbours in memory make up a symbol, so a part of what they tell each other is used by ``plain``, too. Beside them
- ``entropy_left8``: a table for each of 8 classes of left neighbours, which tells what a neighbour knows at all;
- ``coded_lane8``: a table for each of 8 classes of the value before, where the same lane has loaded it.
Tables are fitted to the tensor itself and count with 2 bytes an entry. One row for each tensor, bound and rounding is
appended to a CSV file; the table at the end has totals over all values, also for sites that each choose their best.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.app import data, zoo
from lowtide.app.shared import arguments, specs
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import run_script
from lowtide.app.train.config import PLAIN, Config
from lowtide.app.train.prepare import understand
from lowtide.app.train.trainer import Trainer, settings
from lowtide.bounds import BoundRule
from lowtide.codecs.sz import Sz
from lowtide.coding import layout, lorenzo, planes, rans, rans_fit
from lowtide.coding.planes import Planes
from lowtide.records import Bound, Kind, Need, Per, TensorSpec
from lowtide.reports.text import table
from lowtide.session import MIN_SIZE

RUN = (*ENVIRONMENT, "model", "options", "data", "batch", "seed", "samples", "step", "loss")
CONTEXT = {"entropy": "left8", "coded": "lane8"}  # the table that follows from a value before
ORDERS = ("plain", "row", "plane", "centred", "groups4", "groups8")
COLUMNS = (
    *RUN,
    *("site", "family", "shape", "zeros", "layout", "rounding", "bound", "digits"),
    *(f"{kind}_{name}" for kind in CONTEXT for name in (*ORDERS, CONTEXT[kind])),
)
ROUNDINGS = ("dither", "nearest")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CASE = ("step", "layout", "rounding", "bound")  # what totals are taken for
Part = tuple[Tensor, Tensor | None]  # codes, and where they stand for exactly zero
GROUPS, CLASSES = (4, 8), 8
ENTRY_BITS, ESCAPE_BITS = 16, 32  # of a table, and of a value outside of the alphabet
MOVES = 8  # of channels from table to table
LARGE = 1 << 30  # values of a tensor, so that it has the long chunks of large ones
PIECE = rans_fit.PIECE  # values that are whole symbols, whatever their size
# For the coder, which keeps the number of values a symbol of a model before unless another does better than that did.
FORCED = {
    digits: rans.Model(rans.Alphabet(digits, 2, 0, zero=False, fill=0, rows=rows), torch.empty(0), math.inf)
    for digits, rows in rans_fit.ROWS.items()
}


Look = Callable[["Read", BoundRule, str, int], dict[str, Any]]  # at a tensor: bound, rounding, samples; columns


def configure(
    parser: argparse.ArgumentParser,
    *,
    samples: int = 16,
    bounds: str = "1.0,0.4,0.2,0.1,0.05,0.02",
    out: str = "benchmarks/results/prediction.csv",
) -> None:
    """With the defaults of this script, or of another one that takes the same tensors."""
    add = parser.add_argument
    add("model", nargs="?", default="resnet18", help="a model of the zoo (default: %(default)s)")
    add("--data", default="digits", help="digits, cifar10:PATH, or another set (default: %(default)s)")
    add("--batch", type=int, default=64, help="samples in a batch (default: %(default)s)")
    add("--steps", default="300", help="after which values are taken, as 300,900 (default: %(default)s)")
    add("--samples", type=int, default=samples, help="of the batch that are looked at (default: %(default)s)")
    add("--bounds", default=bounds, help="in standard deviations (default: %(default)s)")
    add("--roundings", default="dither", help=f"of {' and '.join(ROUNDINGS)} (default: %(default)s)")
    add("--layouts", default="contiguous", help=f"of maps in memory: {' and '.join(LAYOUTS)} (default: %(default)s)")
    arguments.add_model(parser)
    arguments.add_shared(parser, out=out)


@dataclass(frozen=True, slots=True)
class Read:
    """What a layer reads, what its backward needs of it, and along which axis its channels lie."""

    site: str
    x: Tensor
    need: Need
    axis: int


def find_need(module: nn.Module) -> tuple[Need, int] | None:
    """The need and the axis of channels, for the layers that are looked at."""
    linear, norm = Need(Kind.VALUES, "", family="linear"), Need(Kind.VALUES, "", family="norm", per=Per.CHANNEL)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return linear, 1
    if isinstance(module, nn.Linear):
        return linear, -1
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return norm, 1
    if isinstance(module, nn.GroupNorm):
        return replace(norm, per=Per.SAMPLE_CHANNEL), 1
    if isinstance(module, nn.LayerNorm):
        return replace(norm, per=Per.ROW, row_dims=len(module.normalized_shape)), -1
    return None


def take(trainer: Trainer, number: int) -> tuple[float, list[Read]]:
    """The loss of step ``number``, and what the layers read in it; what is too small to be coded is left out."""
    found: list[Read] = []
    seen: list[tuple[Tensor, str]] = []

    def look(path: str, x: Tensor, need: Need, axis: int) -> None:
        if x.nbytes < MIN_SIZE or any(x is other and family in ("", need.family) for other, family in seen):
            return
        seen.append((x, need.family))
        found.append(Read(path, x.detach(), need, axis % x.dim()))

    with ExitStack() as stack:
        on_model = trainer.model.register_forward_pre_hook(lambda module, args: seen.append((args[0], "")))
        stack.callback(on_model.remove)
        for path, module in trainer.model.named_modules():
            known = find_need(module)
            if known is not None:
                hook = lambda module, args, path=path, known=known: look(path, args[0], *known)  # noqa: E731
                stack.callback(module.register_forward_pre_hook(hook).remove)
        loss = float(trainer.step(number))
    return loss, found


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes in memory order, where they stand for exactly zero, and the channel of each.

    ``together`` channels that follow each other are in one group: those of the four values that a lane loads.
    """

    q: Tensor
    zero: Tensor | None
    channel: Tensor
    together: int
    spec: TensorSpec

    @classmethod
    def of(cls, read: Read, rule: BoundRule, rounding: str, samples: int) -> Codes:
        """The first samples of what was read, as ``sz`` codes them under the bound of the whole."""
        x, bound = read.x[:samples], rule.resolve(read.x, read.need)
        if 0 in bound.axes:
            bound = Bound(bound.value[:samples], bound.axes)
        zero_code = Sz().plan(x, bound).zero_code
        codec = Sz(rounding=rounding)
        flat = codec.codes(x, bound, plan=codec.plan(x, bound, zero_code))
        zero = flat == rans.ZERO_CODE if zero_code else None
        spec = replace(layout.spec_of(x), dtype=flat.dtype)
        terms = layout.index_terms(spec, (read.axis,))
        channel = layout.entries_at(terms, torch.arange(flat.numel(), device=flat.device))
        return cls(_without(flat, zero), zero, channel, 4 if spec.stride[read.axis] == 1 else 1, spec)

    def predicted(self, within: str) -> Codes:
        """What is left after prediction within each row or plane."""
        shape = Planes.of(self.spec.shape)
        codes = shape.split(layout.restore(self.q, self.spec))
        left = lorenzo.difference(codes if within == "plane" else codes.reshape(-1, 1, shape.width))
        q = layout.memory_view(planes.join(left.contiguous(), self.spec))
        return replace(self, q=_without(q, self.zero))

    def centred(self) -> Codes:
        """Counted from the means of channels; those with a symbol for zero as they are."""
        if self.zero is not None:
            return self
        mean = torch.bincount(self.channel, self.q.double()) / torch.bincount(self.channel)
        return replace(self, q=self.q - mean.round().int()[self.channel])

    def symbols(self) -> Tensor:
        """From 1 on in the order of codes; "exactly zero" is 0."""
        return _without(self.q - int(self.q.amin()) + 1, self.zero).long()

    def left(self) -> Tensor:
        """The symbol of the left neighbour; in the first column that of the code 0."""
        spec = replace(self.spec, dtype=torch.int64)
        rows = Planes.of(spec.shape).split(layout.restore(self.symbols(), spec))
        moved = nn.functional.pad(rows[..., :-1], (1, 0), value=1 - int(self.q.amin()))
        return layout.memory_view(planes.join(moved.contiguous(), spec))

    def count(self, together: int = 1) -> Tensor:
        """How often each symbol occurs in each channel, or in so many that follow each other."""
        owner = self.channel // together
        return count(self.symbols(), owner, int(owner.amax()) + 1)

    def by_lane(self, digits: int) -> Iterator[Part]:
        """By what came just before in the four values that a lane loads, where a symbol leaves something before it."""
        if digits > 2:
            return iter([(self.q, self.zero)])
        whole = self.q.numel() // 4 * 4
        last = classify(self.symbols(), CLASSES)[:whole].view(-1, digits)[:, -1]
        before = last.roll(1) + 1
        before[:: 4 // digits] = 0
        zero = None if self.zero is None else self.zero[:whole].view(-1, digits)
        return _split(self.q[:whole].view(-1, digits), zero, before)


def _split(q: Tensor, zero: Tensor | None, owner: Tensor) -> Iterator[Part]:
    for number in owner.unique().tolist():
        mine = owner == number
        yield q[mine].flatten(), None if zero is None else zero[mine].flatten()


def _without(q: Tensor, zero: Tensor | None) -> Tensor:
    return q if zero is None else q * ~zero


def count(symbol: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
    """How often each symbol occurs with each owner: (owners, symbols)."""
    symbols = int(symbol.amax()) + 1
    if owner is not None:
        symbol = symbol + owner * symbols
    return torch.bincount(symbol, minlength=owners * symbols).view(owners, symbols).double()


def entropy(counts: Tensor, numel: int) -> float:
    """Bits a value of order 0, with a table for each row; ``numel`` values share the tables."""
    totals = counts.sum(1, keepdim=True)
    information = -torch.xlogy(counts, counts / totals.clamp(min=1)).sum() / math.log(2)
    return float(information / totals.sum()) + ENTRY_BITS * int(counts.count_nonzero()) / numel


def group(counts: Tensor, groups: int) -> Tensor:
    """The group of each channel, from its counts of symbols."""
    channels, device = len(counts), counts.device
    own = torch.stack([torch.special.entr(row / row.sum()).sum() for row in counts])
    found = torch.empty(channels, dtype=torch.int64, device=device)
    found[own.argsort()] = torch.arange(channels, device=device) * groups // channels
    for _ in range(MOVES):
        tables = counts.new_zeros(groups, counts.shape[1]).index_add_(0, found, counts)
        share = tables / tables.sum(1, keepdim=True).clamp(min=1)
        found = (counts @ -share.clamp(min=1 / rans.SCALE).log2().T).argmin(1)
    return found


def classify(symbols: Tensor, classes: int) -> Tensor:
    """Symbols by size, in classes of about as many values each."""
    counts = torch.bincount(symbols).double()
    middle = (counts.cumsum(0) - counts / 2) / counts.sum()
    return (middle * classes).long().clamp(max=classes - 1)[symbols]


def code(parts: Iterable[Part], digits: int, numel: int, *, strict: bool = False) -> float:
    """Bits a value of the coder with so many values a symbol, each part with a table of its own.

    inf if ``strict`` and the coder would refuse: it does where escapes would keep kernels waiting.
    """
    bits, table_bits, taken = 0.0, 0, 0
    for part in (_whole(*part) for part in parts):
        q, zero = part
        marked = q if zero is None else torch.where(zero, rans.ZERO_CODE, q)
        model, size = rans_fit.fit(marked, LARGE, FORCED[digits], zero_code=zero is not None), q.numel()
        if model.bits > ESCAPE_BITS:  # refused: it has counted all values as escapes
            outside = math.inf if strict else float((model.alphabet.digits(*part) < 0).double().mean())
            model = replace(model, bits=model.bits - ESCAPE_BITS * (1 - outside))
        bits, taken = bits + model.bits * size, taken + size
        table_bits += ENTRY_BITS * model.alphabet.symbols
    return bits / taken + table_bits / numel


def _whole(q: Tensor, zero: Tensor | None) -> Part:
    """As many values as are whole symbols, whatever their size; fewer than that are repeated. On the CPU."""
    laps, count = -(-PIECE // q.numel()), max(q.numel() // PIECE, 1) * PIECE
    return q.cpu().repeat(laps)[:count], None if zero is None else zero.cpu().repeat(laps)[:count]


def measure(codes: Codes, numel: int) -> dict[str, Any]:
    """Columns of a row; ``numel`` values are saved, of which codes may be a part."""
    found: dict[str, Any] = {}
    coded: dict[str, dict[int, float]] = {}
    streams = (codes, codes.predicted("row"), codes.predicted("plane"), codes.centred())
    for name, stream in zip(ORDERS[:4], streams, strict=True):
        coded[name] = {size: code([(stream.q, stream.zero)], size, numel, strict=True) for size in FORCED}
        found[f"entropy_{name}"] = entropy(count(stream.symbols()), numel)
        found[f"coded_{name}"] = min(coded[name].values())
    found["digits"] = min(coded["plain"], key=coded["plain"].__getitem__)
    sizes = [size for size, bits in coded["plain"].items() if bits < math.inf]
    by_channel = codes.count()
    for kind in CONTEXT:
        found[f"{kind}_centred"] += ENTRY_BITS * len(by_channel) / numel  # for the means
    for groups in GROUPS:
        known = len(by_channel) * math.log2(groups) / numel  # which channel is in which group
        joined = count(codes.symbols(), group(by_channel, groups)[codes.channel], groups)
        found[f"entropy_groups{groups}"] = entropy(joined, numel) + known
        of_channel = group(codes.count(codes.together), groups).repeat_interleave(codes.together)
        parts = [*_split(codes.q, codes.zero, of_channel[codes.channel])]
        found[f"coded_groups{groups}"] = min(code(parts, size, numel) for size in sizes) + known
    found["entropy_left8"] = entropy(count(codes.symbols(), classify(codes.left(), CLASSES), CLASSES), numel)
    found["coded_lane8"] = min(code(codes.by_lane(size), size, numel) for size in sizes)
    return found


def prepare(options: argparse.Namespace, device: torch.device, steps: int) -> Trainer:
    """A run of as many whole epochs as have ``steps`` steps."""
    name, path = data.parse(options.data)
    small = ("width", "stem", "depth", "heads")  # the rest follows from the data
    tiny = {key: value for key, value in zoo.describe(options.model).tiny.items() if key in small}
    given = {**(tiny if options.tiny else {}), **specs.parse_options(options.set)}
    train = {name: getattr(options, name) for name in ("batch", "seed")}
    config, found, model = understand(Config.read({
        "model": {"name": options.model, "options": given},
        "data": {"name": name, "path": path},
        "method": {"name": PLAIN},
        "train": train,
    }))  # fmt: skip
    epochs = math.ceil(steps / max(found.train.per_epoch // options.batch, 1))
    return Trainer(config.replace(train={"epochs": epochs}), found, model, device)


def run(
    options: argparse.Namespace, *, columns: tuple[str, ...] = COLUMNS, look: Look | None = None
) -> list[dict[str, Any]]:
    """One row for each step, tensor, layout, rounding and bound; ``look`` is what another script does with each."""
    arguments.require_positive(options, "batch", "samples")
    device = arguments.find_device(options)
    steps = [specs.parse_value(text) for text in specs.split(options.steps)]
    if not steps or not all(isinstance(step, int) and step > 0 for step in steps):
        raise specs.UsageError(f"--steps are numbers of 1 or more, as 300,900; got {options.steps!r}")
    rules = [BoundRule.parse(f"{text} std") for text in specs.split(options.bounds)]
    roundings = specs.choose("rounding", options.roundings, ROUNDINGS)
    layouts = specs.choose("layout", options.layouts, LAYOUTS)
    out = ResultFile(arguments.find_out(options), columns).begin()
    trainer = prepare(options, device, max(steps) + 1)
    shared = describe(options, trainer, device)
    rows = []
    for number in range(max(steps) + 1):
        with settings(trainer.config, device):
            loss, reads = take(trainer, number) if number in steps else (trainer.step(number), [])
        if not number % 50:
            arguments.say(f"step {number}: loss {float(loss):.4f}")
        for read in reads:
            arguments.say(f"{read.site} {tuple(read.x.shape)}")
            for found in look_at(read, layouts, roundings, rules, options.samples, look or estimate):
                rows.append({**shared, "date": now(), "step": number, "loss": float(loss), **found})
                out.append(rows[-1])
    trainer.close()
    return rows


def estimate(read: Read, rule: BoundRule, rounding: str, samples: int) -> dict[str, Any]:
    return measure(Codes.of(read, rule, rounding, samples), read.x.numel())


def look_at(
    read: Read, layouts: list[str], roundings: list[str], rules: list[BoundRule], samples: int, look: Look = estimate
) -> Iterator[dict[str, Any]]:
    zeros = float((read.x == 0).double().mean())
    about = {"site": read.site, "family": read.need.family, "shape": "x".join(map(str, read.x.shape)), "zeros": zeros}
    for name, rounding, rule in itertools.product(layouts, roundings, rules):
        x = read.x.contiguous(memory_format=LAYOUTS[name]) if read.x.dim() == 4 else read.x
        found = look(replace(read, x=x), rule, rounding, samples)
        yield {**about, "layout": name, "rounding": rounding, "bound": rule.value, **found}


def describe(options: argparse.Namespace, trainer: Trainer, device: torch.device) -> dict[str, Any]:
    row = {name: getattr(options, name) for name in ("model", "batch", "seed", "samples")}
    given = " ".join(f"{key}={value}" for key, value in trainer.config.model.options.items())
    return describe_environment(device, options.revision) | row | {"options": given, "data": trainer.config.data.name}


def choices(kind: str) -> dict[str, tuple[str, ...]]:
    """What a site may choose from."""
    parts = {"prediction": ("row", "plane"), "groups": ("groups4", "groups8"), "context": (CONTEXT[kind],)}
    return {name: ("plain", *ways) for name, ways in parts.items()} | {"all": (*ORDERS, CONTEXT[kind])}


def show(rows: list[dict[str, Any]]) -> list[str]:
    """Bits of all values together, and by how much each way changes them; then if each site chooses its best."""
    lines = []
    for kind, context in CONTEXT.items():
        ways: dict[str, tuple[str, ...]] = {name: (name,) for name in (*ORDERS[1:], context)}
        ways |= {f"best: {name}": among for name, among in choices(kind).items()}
        cells = []
        for case in dict.fromkeys(tuple(row[name] for name in CASE) for row in rows):
            mine = [row for row in rows if tuple(row[name] for name in CASE) == case]
            for family in (*sorted({row["family"] for row in mine}), "all"):
                chosen = [row for row in mine if family in (row["family"], "all")]
                plain = total(chosen, kind, ("plain",))
                changes = [f"{total(chosen, kind, names) / plain - 1:+.1%}" for names in ways.values()]
                cells.append((*map(str, case), family, f"{plain:.3f}", *changes))
        lines += [f"bits a value, {kind}", *table((*CASE, "sites", "plain", *ways), cells), ""]
    return lines[:-1]


def total(rows: list[dict[str, Any]], kind: str, names: tuple[str, ...]) -> float:
    """Bits a value over all sites, each of which chooses the best of ``names``."""
    sizes = [math.prod(map(int, row["shape"].split("x"))) for row in rows]
    bits = [min(row[f"{kind}_{name}"] for name in names) for row in rows]
    return sum(size * bit for size, bit in zip(sizes, bits, strict=True)) / sum(sizes)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
