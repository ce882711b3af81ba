"""What to say when the device runs out of memory: what was needed, and what would fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from lowtide.app.shared import allocator
from lowtide.app.train.config import PLAIN, Config
from lowtide.app.train.memory import Meter
from lowtide.errors import LowtideError
from lowtide.growth import is_out_of_memory
from lowtide.reports.text import size
from lowtide.session import Session

_SPARE = 0.9  # of the device: what an allocator can use before gaps between its blocks get in the way


class OutOfMemoryError(LowtideError):
    """The device has too little memory for this run; the message says what would fit."""


@contextlib.contextmanager
def explained(advice: Callable[[], str]) -> Iterator[None]:
    """Put advice in the place of an error that says that memory ran out."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(advice()) from error
        raise


def advise_setup(config: Config, model: nn.Module, device: torch.device) -> str:
    """Before there is a step no batch helps: it is the weights that do not fit, or somebody else has the memory."""
    parts = [_place(config, "before the first step", device)]
    parts.append(f"the weights take {size(sum(parameter.nbytes for parameter in model.parameters()))}")
    with contextlib.suppress(RuntimeError):  # it takes some memory to ask
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            parts.append(f"{size(free)} of {size(total)} are free")
    return "; ".join([*parts, "try a smaller model, or a device with more memory to spare"])


def advise(config: Config, when: str, *, meter: Meter, session: Session | None, device: torch.device) -> str:
    """One paragraph: where it failed, what is saved for backward, which batch or method would need less."""
    batch = config.train.batch
    parts = [_place(config, when, device)]
    if session is not None and session.ledger.raw_peak:
        raw, held = session.ledger.raw_peak, session.ledger.held_peak
        parts.append(f"until then {size(held)} was held for backward instead of {size(raw)}")
    elif meter.raw:
        parts.append(f"plain training saves {size(meter.raw)} for backward")
    if device.type == "cuda" and allocator.is_off_by_choice():
        given = allocator.describe_setting()
        parts.append(f"{given} leaves out {allocator.SETTING}, without which gaps between tensors may be lost")
    parts.append(f"try --batch {suggest_batch(batch, meter, device)}, or {_suggest_method(config.method.name)}")
    return "; ".join(parts)


def suggest_batch(batch: int, meter: Meter, device: torch.device) -> int:
    """The batch that would fit by what the steps before have needed, or half of it where none has been measured."""
    half = max(1, batch // 2)
    if device.type != "cuda" or not meter.peak or meter.static is None:
        return half
    _, total = torch.cuda.mem_get_info(device)
    each = (meter.peak - meter.static) / batch
    fitting = int((_SPARE * total - meter.static) / each) if each > 0 else half
    return fitting if 1 <= fitting < batch else half


def _place(config: Config, when: str, device: torch.device) -> str:
    return f"out of memory on {device} {when}, batch {config.train.batch}, method {config.method.name!r}"


def _suggest_method(name: str) -> str:
    if name == PLAIN:
        return "hold activations compressed: --method careful, or --method bold for less"
    if name == "exact":
        return "let values be compressed too: --method careful, or --method bold for less"
    return "wider bounds: --method bold, or --option linear and norm with larger multiples of std"
