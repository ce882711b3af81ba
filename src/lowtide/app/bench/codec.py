"""Measure codecs on large tensors: bits a value, speed against a plain copy.

For every source, dtype, codec and bound: decode what was encoded and compare all of it with the promise; only then time
encoding, decoding and a plain copy of the same tensor, in turn. Columns and conditions: docs/bench.md.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.app.bench import roundtrip, sources
from lowtide.app.bench.sources import Source
from lowtide.app.shared import arguments, specs
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, explain, now
from lowtide.app.shared.workload import find_workload
from lowtide.bounds import BoundRule
from lowtide.codecs import Codec
from lowtide.reports.text import table

COLUMNS = (
    *ENVIRONMENT,
    *("source", "origin", "shape", "layout", "dtype", "raw_nbytes", "codec", "bound", "kind", "planned", "ticketed"),
    *("seed", "warm", "repeats", "ok", "error", "payload_nbytes", "bits", "entropy_bits", "bits_over_entropy"),
    *("encode_ms", "encode_ms_min", "encode_ms_max", "decode_ms", "decode_ms_min", "decode_ms_max"),
    *("copy_ms", "copy_ms_min", "copy_ms_max", "encode_gb_s", "decode_gb_s", "copy_gb_s", "coding_over_copy"),
)
EXAMPLES = """examples:
  lowtide bench codec --bytes 2GiB --codecs sz:rans,sz:blocks \\
      --bounds "1.0 std,0.4 std"
  lowtide bench codec --real resnet50 --layers 3 --dtypes bfloat16 \\
      --codecs sz:rans
  lowtide bench codec --device cpu --bytes 1M --out - \\
      --codecs "sz:blocks,sz(rounding=nearest),cast:bf16"
"""
_AMOUNTS = ("seed", "warm", "repeats")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--codecs",
        default="sz:rans,sz:blocks",
        help="as sz:rans, groups:2, 'sz(rounding=nearest)' (default: %(default)s)",
    )
    add("--bounds", default="1.0 std,0.4 std", help="bounds for codecs that take one (default: %(default)s)")
    add("--sources", default="relu,norm", help=f"of {', '.join(sources.NAMES)} (default: all)")
    add("--dtypes", default="float32,bfloat16", help=f"of {', '.join(_DTYPES)} (default: %(default)s)")
    add("--bytes", help="size of the raw tensor: 64K, 16MiB, 2GiB (default: 2GiB on cuda, 16MiB on cpu)")
    add("--repeats", type=int, default=20, help="timed turns, of which the median counts (default: %(default)s)")
    add("--warm", type=int, default=3, help="untimed turns before them (default: %(default)s)")
    add("--channels-last", action="store_true", help="channels_last tensors (those of a net in bf16 are in any case)")
    real = parser.add_argument_group("activations of a net in training, instead of random numbers")
    real.add_argument("--real", metavar="MODEL", help="a model of the zoo, as resnet18, or torchvision:NAME")
    real.add_argument(
        "--layers", type=int, default=2, help="how many, those with the largest input (default: %(default)s)"
    )
    real.add_argument("--steps", type=int, default=30, help="training steps before (default: %(default)s)")
    real.add_argument("--batch", type=int, default=64, help="samples in a batch (default: %(default)s)")
    arguments.add_model(real)
    arguments.add_shared(parser, out="benchmarks/results/codec.csv")


@dataclass(frozen=True, slots=True)
class Case:
    """One codec under one bound (None: it takes none)."""

    text: str
    codec: Codec
    rule: BoundRule | None


def run(options: argparse.Namespace) -> int:
    """All cases; 0 if every gate was passed."""
    arguments.require_positive(options, "repeats", "layers", "batch", "steps")
    device = arguments.find_device(options)
    out = ResultFile(arguments.find_out(options), COLUMNS)
    work = _pair(_read_cases(options), list(_list_sources(options, device)))
    out.begin()
    environment = describe_environment(device, options.revision)
    total = sum(len(chosen) for _, chosen in work)
    rows: list[dict[str, Any]] = []
    for source, chosen in work:
        x = source.make()
        for case in chosen:
            title = f"{source.name} ({source.origin}) {_short(source.dtype)}, {case.text} {case.rule or ''}"
            arguments.say(f"[{len(rows) + 1}/{total}] {title.rstrip()}: ", end="")
            row = {**environment, "date": now(), **_describe(source, case, x, options)}
            row |= _attempt(source, case, x, options)
            out.append(row)
            rows.append(row)
            arguments.say(_progress(row))
        del x
    print("\n".join(show(rows)))
    return 0 if all(row["ok"] for row in rows) else 1


def _read_cases(options: argparse.Namespace) -> list[Case]:
    rules = [BoundRule.parse(text) for text in specs.split(options.bounds)]
    found = [specs.parse_codec(text) for text in specs.split(options.codecs)]
    if not found or not rules:
        raise specs.UsageError("--codecs and --bounds each need at least one entry")
    return [Case(text, codec, rule) for text, codec in found for rule in (rules if codec.takes_bound else [None])]


def _pair(cases: list[Case], tensors: list[Source]) -> list[tuple[Source, list[Case]]]:
    """Every tensor with the codecs that take its dtype."""
    work = [(source, [case for case in cases if _suits(case, source)]) for source in tensors]
    work = [(source, chosen) for source, chosen in work if chosen]
    if not work:
        raise specs.UsageError("none of these codecs takes any of these dtypes")
    refused = {(case.text, _short(source.dtype)) for source in tensors for case in cases if not _suits(case, source)}
    for text, dtype in sorted(refused):
        arguments.say(f"{text} does not take {dtype}: left out")
    return work


def _suits(case: Case, source: Source) -> bool:
    return case.codec.accepts(source.dtype)


def _list_sources(options: argparse.Namespace, device: torch.device) -> Iterator[Source]:
    nbytes = specs.parse_bytes(options.bytes or ("2GiB" if device.type == "cuda" else "16MiB"))
    names = specs.choose("source", options.sources, sources.NAMES)
    dtypes = [_DTYPES[name] for name in specs.choose("dtype", options.dtypes, _DTYPES)]
    common: dict[str, Any] = {"seed": options.seed, "channels_last": options.channels_last}
    if not options.real:
        yield from (sources.draw(name, dtype, device, nbytes=nbytes, **common) for dtype in dtypes for name in names)
        return
    load = find_workload(options.real, specs.parse_options(options.set), tiny=options.tiny)
    for dtype in dtypes:
        net = sources.Net(load, dtype, device, batch=options.batch, steps=options.steps, **common)
        for name in names:
            yield from net.sources(name, layers=options.layers, nbytes=nbytes)


def _describe(source: Source, case: Case, x: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "source": source.name,
        "origin": source.origin,
        "shape": "x".join(map(str, x.shape)),
        "layout": "contiguous" if x.is_contiguous() else "channels_last",
        "dtype": _short(source.dtype),
        "raw_nbytes": x.numel() * x.itemsize,
        "codec": case.text,
        "bound": str(case.rule or ""),
        **{name: getattr(options, name) for name in _AMOUNTS},
    }


def _attempt(source: Source, case: Case, x: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Results of a case, or its failure: one case does not end the run."""
    try:
        with torch.no_grad():
            bound = case.rule.resolve(x, source.need) if case.rule is not None else None
            with_mask, amounts = source.name == "relu", {name: getattr(options, name) for name in _AMOUNTS}
            return roundtrip.measure(case.codec, x, bound, with_mask=with_mask, **amounts)
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        return {"ok": False, "error": explain(error)}


def show(rows: list[dict[str, Any]]) -> list[str]:
    """The table at the end."""
    heads = ("source", "dtype", "codec", "bound", "bits", "x entropy", "encode ms", "decode ms", "encode GB/s",
             "decode GB/s", "copy GB/s", "coding/copy", "gate")  # fmt: skip
    names = ("bits", "bits_over_entropy", "encode_ms", "decode_ms", "encode_gb_s", "decode_gb_s", "copy_gb_s",
             "coding_over_copy")  # fmt: skip
    cells = []
    for row in rows:
        source = row["source"] if row["origin"] == "drawn" else f"{row['source']} {row['origin']}"
        numbers = [f"{row[name]:.4g}" if row.get(name) is not None else "" for name in names]
        cells.append((source, row["dtype"], row["codec"], row["bound"], *numbers, "ok" if row["ok"] else "FAILED"))
    return table(heads, cells)


def _progress(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return f"FAILED, {row['error']}"
    return (
        f"{row['bits']:.3f} bits, encode {row['encode_ms']:.3f} ms, decode {row['decode_ms']:.3f} ms, "
        f"{row['coding_over_copy']:.2f} x copy"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
