"""One codec on one tensor: the gate, then size and speed, then the gate again."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lowtide import kernels
from lowtide.app.bench import gate, timing
from lowtide.codecs import Codec
from lowtide.records import Bound, Encoded

_SAMPLE = 1 << 24  # elements that the entropy is taken of


class Coder:
    """A codec at work on one tensor, called as training calls it: by its twin for the device, by an earlier plan."""

    def __init__(self, codec: Codec, x: Tensor, bound: Bound | None, *, seed: int) -> None:
        self.x, self.bound, self.seed = x, bound, seed
        self.codec = codec
        self.twin: Any = kernels.twin(codec, x.device, x.dtype)
        self.plan = self.twin.plan(x, bound) if hasattr(self.twin, "plan") else None
        self.ticketed = bool(getattr(self.twin, "ticketed", False))
        self.keeps_zeros = bool(getattr(codec, "keep_zeros", False))

    def encode(self, ticket: Tensor | None = None) -> Encoded:
        extra = {} if self.plan is None else {"plan": self.plan}
        if ticket is not None:
            extra["ticket"] = ticket
        encoded: Encoded = self.twin.encode(self.x, self.bound, seed=self.seed, **extra)
        return encoded

    def find_fault(self, encoded: Encoded, decoded: Tensor, *, with_mask: bool) -> str:
        nonzero = None
        if with_mask and self.bound is not None:
            nonzero = self.twin.nonzero(encoded) if self.keeps_zeros else decoded
        return gate.find_fault(self.x, decoded, self.bound, nonzero=nonzero)

    def entropy(self) -> float | None:
        """Bits a value of the codes, each by itself: of the leading samples of the tensor, up to 2**24 values."""
        codes = getattr(self.twin, "codes", None) or getattr(self.codec, "codes", None)
        if codes is None:
            return None
        extra = {} if self.plan is None else {"plan": self.plan}
        sample = self.x[: max(1, _SAMPLE // self.x[0].numel())]
        counts = torch.unique(codes(sample, self.bound, seed=self.seed, **extra), return_counts=True)[1]
        share = counts.double() / counts.sum()
        return float(-(share * share.log2()).sum())


def measure(
    codec: Codec, x: Tensor, bound: Bound | None, *, with_mask: bool, seed: int, warm: int, repeats: int
) -> dict[str, Any]:
    """Columns of a row; ``ok`` is False and nothing is timed where the gate finds a fault.

    ``with_mask`` asks for a code for "exactly zero", as training does where ReLU reads the tensor too, and checks it.
    """
    if with_mask and hasattr(codec, "keep_zeros"):
        codec = dataclasses.replace(codec, keep_zeros=True)  # type: ignore[type-var]
    coder = Coder(codec, x, bound, seed=seed)
    encoded = coder.encode()
    row: dict[str, Any] = {"ok": False, "planned": coder.plan is not None, "ticketed": coder.ticketed}
    row |= {"kind": encoded.meta.get("kind", ""), "payload_nbytes": encoded.nbytes}
    row["bits"] = 8 * encoded.nbytes / x.numel()
    fault = coder.find_fault(encoded, coder.twin.decode(encoded), with_mask=with_mask)
    if fault:
        return row | {"error": fault}
    del encoded
    entropy = coder.entropy()
    if entropy is not None:
        row |= {"entropy_bits": entropy, "bits_over_entropy": row["bits"] / entropy if entropy else None}
    times, decoded = _time(coder, warm=warm, repeats=repeats)
    for timed in (decoded, None):
        encoded = coder.encode()
        again = coder.twin.decode(encoded) if timed is None else timed
        fault = coder.find_fault(encoded, again, with_mask=with_mask)
        if fault:
            return row | {"error": f"after the timed turns: {fault}"}
    for name, taken in times.items():
        row |= taken.cells(f"{name}_ms")
        moved = x.numel() * x.itemsize * (2 if name == "copy" else 1)
        row[f"{name}_gb_s"] = moved / taken.median / 1e6
    both = times["encode"].median + times["decode"].median
    return row | {"ok": True, "error": "", "coding_over_copy": both / times["copy"].median}


def _time(coder: Coder, *, warm: int, repeats: int) -> tuple[dict[str, timing.Times], Tensor]:
    """Copy, encode, decode, copy, ...; and what the last decode gave."""
    x, target = coder.x, torch.empty_like(coder.x)
    last: dict[str, Any] = {}
    tickets = [_make_ticket(x.device) for _ in range(warm + repeats)] if coder.ticketed else []
    unused = iter(tickets)  # ``tickets`` itself lives until the device has written the last of them

    def encode() -> None:
        last["encoded"] = coder.encode(next(unused, None))

    def decode() -> None:
        last["decoded"] = coder.twin.decode(last["encoded"])

    actions = {"copy": lambda: target.copy_(x), "encode": encode, "decode": decode}
    times = timing.interleave(actions, x.device, warm=warm, repeats=repeats)
    return times, last["decoded"]


def _make_ticket(device: torch.device) -> Tensor:
    """Where the device leaves the size of a payload for the host to find; -1 until it has."""
    return torch.full((1,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
