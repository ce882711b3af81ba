"""What methods without a bound do where an error does not end in one weight gradient but goes on to other layers."""

from __future__ import annotations

from collections.abc import Callable

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.coding.bitpack import WIDTHS

PROPAGATING = ("attention", "product", "pointwise", "unknown")  # families of ops
LOG_PROBABILITY = "log_probability"  # backward takes its exponential: an error is a share of the probability


def wider(bits: float) -> dict[str, int]:
    """Widths by family: twice the bits, which are steps of at most a quarter; 8 for log-probabilities."""
    width = min((width for width in WIDTHS if width >= 2 * bits), default=WIDTHS[-1])
    return {**dict.fromkeys(PROPAGATING, width), LOG_PROBABILITY: WIDTHS[-1]}


def wider_codecs(make: Callable[[int], Codec], bits: float) -> dict[str, Codec | None]:
    """The same as codecs: ``make`` gives the method's for a width; log-probabilities have groups."""
    families = {family: make(width) for family, width in wider(bits).items()}
    return {**families, LOG_PROBABILITY: codecs.create("groups", bits=8)}
