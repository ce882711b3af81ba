"""A report for people: totals, shares by need, sites, and what was left alone and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowtide.controllers import Noise
from lowtide.ledger import SiteEntry


def render(
    method: str,
    totals: dict[str, Any],
    sites: Sequence[SiteEntry],
    noise: Mapping[str, Noise] | None = None,
    events: Sequence[str] = (),
) -> str:
    """The whole report."""
    lines = [f"Lowtide, method {method}, {totals['step']} steps"]
    ratio = f" ({totals['ratio']:.2f}x less)" if totals["ratio"] else ""
    lines.append(
        f"saved for backward: {size(totals['raw_nbytes_peak'])} in plain training, {size(totals['held_nbytes_peak'])} "
        f"held at most{ratio}; now {size(totals['held_nbytes_now'])}"
    )
    if "cuda_allocated_peak" in totals:
        allocated, reserved = size(totals["cuda_allocated_peak"]), size(totals["cuda_reserved_peak"])
        lines.append(f"CUDA peak: {allocated} allocated, {reserved} reserved")
    if not sites:
        return "\n".join([*lines, "nothing has been saved yet"])
    rows = [(need, str(row["saves"]), size(row["raw"]), size(row["held"])) for need, row in shares(sites).items()]
    lines += ["", *table(("need", "saves", "plain", "held"), rows)]
    coded = [entry for entry in sites if entry.codec != "kept"]
    by_site = [
        (entry.name, entry.codec, short(entry.bound) or "exact", size(entry.raw_nbytes), size(entry.held_nbytes))
        for entry in coded
    ]
    lines += ["", *table(("site (last step)", "codec", "bound", "plain", "held"), by_site)]
    rest = left_alone(sites)
    if rest:
        by_reason = [(reason, str(row["saves"]), size(row["held"])) for reason, row in rest.items()]
        lines += ["", *table(("left alone, because", "saves", "held"), by_reason)]
    if noise:
        heads = ("added gradient noise", "share", "predicted", "measured", "in step", "propagated")
        shown = [
            (
                name,
                *map(_share, (item.share, item.predicted, item.measured)),
                "" if item.checked is None else str(item.checked),
                _share(item.propagated),
            )
            for name, item in noise.items()
        ]
        lines += ["", *table(heads, shown)]
    if events:
        lines += ["", *events]
    return "\n".join(lines)


def shares(sites: Iterable[SiteEntry]) -> dict[str, dict[str, int]]:
    """Saves and bytes by need, largest first."""
    return _grouped((entry.need, entry) for entry in sites)


def left_alone(sites: Iterable[SiteEntry]) -> dict[str, dict[str, int]]:
    """Saves and bytes that were kept as they are, by reason, largest first."""
    return _grouped((entry.reason, entry) for entry in sites if entry.codec == "kept")


def _grouped(pairs: Iterable[tuple[str, SiteEntry]]) -> dict[str, dict[str, int]]:
    groups: dict[str, dict[str, int]] = {}
    for key, entry in pairs:
        row = groups.setdefault(key, {"saves": 0, "raw": 0, "held": 0})
        row["saves"] += entry.saves
        row["raw"] += entry.raw_nbytes
        row["held"] += entry.held_nbytes
    return dict(sorted(groups.items(), key=lambda item: -item[1]["raw"]))


def short(bound: str) -> str:
    """A bound with three digits: controllers choose numbers that nobody wants to read to the end."""
    value, space, unit = bound.partition(" ")
    try:
        return f"{float(value):.3g}{space}{unit}"
    except ValueError:
        return bound


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def size(nbytes: int) -> str:
    """Bytes for people: 1536 -> 1.5 KiB."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.2f} {unit}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, the first one to the left and the rest to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = []
    for row in [heads, ["-" * width for width in widths], *rows]:
        cells = [cell.ljust(width) if not column else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(cells).rstrip())
    return lines
