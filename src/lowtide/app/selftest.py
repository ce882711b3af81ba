"""A test of seconds: every codec on every device keeps its promise, and a training step does.

Not the test suite: it tells an installation that works from one that does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import codecs, kernels
from lowtide.app.bench.gate import find_fault
from lowtide.codecs import Codec
from lowtide.coding import membership
from lowtide.records import Bound
from lowtide.registry import CODECS
from lowtide.session import DEFAULT_METHOD, attach

_SHAPE = (4, 8, 16, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64)
_BOUND = 0.05
_LOSSLESS = ("identity", "lossless", "window_index")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One test. ``fault`` is empty if it passed."""

    device: str
    name: str
    kernel: str
    promise: str
    fault: str
    milliseconds: float


def run(devices: Iterable[torch.device]) -> Iterator[Verdict]:
    """All tests on these devices."""
    for device in devices:
        for name in CODECS.names():
            for dtype in DTYPES:
                codec = codecs.create(name)
                if codec.accepts(dtype):
                    yield _try_codec(kernels.twin(codec, device, dtype), device, dtype)
        yield _try(device, "step, exact", "", "gradients bit-equal to plain", partial(_try_exact, device))
        yield _try(device, f"step, {DEFAULT_METHOD}", "", "every decode checked", partial(_try_default, device))


def kernel_of(codec: Codec) -> str:
    """What runs when this codec, or its twin, is asked."""
    package, _, file = type(codec).__module__.rpartition(".")
    if package != "lowtide.kernels":
        return "plain torch"
    return "CUDA C++" if file.startswith("_") else "Triton"  # Triton twins have the names of their codecs


def _try_codec(codec: Codec, device: torch.device, dtype: torch.dtype) -> Verdict:
    short = str(dtype).removeprefix("torch.")
    other = "finite" if codec.carries_values else "shape"
    promise = f"|error| <= {_BOUND}" if codec.takes_bound else "exact" if _is_exact(codec) else other
    return _try(device, f"{codec.name}, {short}", kernel_of(codec), promise, partial(_check, codec, device, dtype))


def _is_exact(codec: Codec) -> bool:
    return codec.name in _LOSSLESS or hasattr(codec, "membership")


def _check(codec: Codec, device: torch.device, dtype: torch.dtype) -> str:
    x = _sample(dtype).to(device)
    bound = Bound.absolute(_BOUND) if codec.takes_bound else None
    decoded = codec.decode(codec.encode(x, bound, seed=1))
    if not codec.carries_values and not _is_exact(codec):
        return "" if decoded.shape == x.shape and decoded.dtype == x.dtype else "the shape did not come back"
    question = getattr(codec, "membership", None)
    if question is not None:
        same = membership.classify(decoded, question) == membership.classify(x, question)
        return "" if bool(same.all()) else f"{int((~same).sum())} elements changed their class"
    if codec.name in _LOSSLESS:
        return "" if torch.equal(decoded, x) else f"{int((decoded != x).sum())} values came back changed"
    return find_fault(x, decoded, bound)


def _sample(dtype: torch.dtype) -> Tensor:
    """Values as they are behind a ReLU, both signs in half of the channels."""
    values = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0))
    values[:, ::2].relu_()
    if dtype == torch.bool:
        return values > 0
    return values.mul(100).long().abs() if dtype == torch.int64 else values.to(dtype)


def _try_exact(device: torch.device) -> str:
    plain, ours = (_gradients(device, method) for method in (None, "exact"))
    return "" if all(map(torch.equal, plain, ours)) else "gradients differ from those of plain training"


def _try_default(device: torch.device) -> str:
    gradients = _gradients(device, DEFAULT_METHOD)
    return "" if all(bool(part.isfinite().all()) for part in gradients) else "gradients are not finite"


def _gradients(device: torch.device, method: str | None) -> list[Tensor]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
        ).to(device)  # fmt: skip
        images, labels = torch.randn(8, 3, 16, 16).to(device), torch.arange(8).to(device)
    tide = attach(model, method, check="full") if method else None
    F.cross_entropy(model(images), labels).backward()
    if tide is not None:
        tide.detach()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _try(device: torch.device, name: str, kernel: str, promise: str, test: Callable[[], str]) -> Verdict:
    """Whatever goes wrong is the verdict of this test, and the others are still made."""
    begin = time.perf_counter()
    try:
        fault = test()
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    elapsed_ms = 1e3 * (time.perf_counter() - begin)
    return Verdict(str(device), name, kernel, promise, fault, elapsed_ms)
