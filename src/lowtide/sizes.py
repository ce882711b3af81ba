"""Amounts of memory as people write them: 17179869184, "16GiB", "512 MB"."""

from __future__ import annotations

import re

from lowtide.errors import SizeError

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(i?B)?", re.IGNORECASE)


def parse(size: int | str, *, what: str = "a size") -> int:
    """Bytes. KiB, MiB, GiB and TiB are powers of 1024, and so are K, M, G, KB, MB, GB: what allocators count in."""
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        nbytes = _amount(match) if match is not None else 0
    else:
        nbytes = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if nbytes <= 0:
        raise SizeError(f"{what} is a number of bytes or a text such as '512MiB' or '16GiB'; got {size!r}")
    return nbytes


def _amount(match: re.Match[str]) -> int:
    return int(float(match["number"]) * 1024 ** " KMGT".index(match["unit"].upper() or " "))
