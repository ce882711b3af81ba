"""What a module finds outside of itself, so that a second run finds it as the first one did, and leaves no trace.

That is autocast, the random generators of the CPU and of the module's device, and its buffers. In eager mode a
generator is moved back for as long as the second run lasts; while a graph is captured nobody can do that, and
``graphs/draws.py`` has another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor, nn


class Draws(Protocol):
    """What one run of a module draws on its device. As a context it is for the second run."""

    def end(self) -> None:
        """The first run is over."""
        ...

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> bool | None: ...


class Begin(Protocol):
    """Called when a module at ``path``, whose parameters are on ``device``, is about to run for the first time."""

    def __call__(self, path: str, device: torch.device) -> Draws: ...


class NoDraws:
    """Of a module that is not on a GPU: what it draws comes from the CPU's generator."""

    def end(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NO_DRAWS = NoDraws()


class Rewound:
    """Draws from the generator of a GPU, which is moved back for the second run."""

    __slots__ = ("_generator", "_now", "has_drawn", "start")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.start = _position(generator)
        self.has_drawn = True  # as far as is known before its end

    def end(self) -> None:
        self.has_drawn = _position(self._generator) != self.start

    def __enter__(self) -> None:
        self._now = _position(self._generator)
        if self.has_drawn:
            _move(self._generator, self.start)

    def __exit__(self, *_: object) -> None:
        if _position(self._generator) != self._now:
            _move(self._generator, self._now)


def rewind(path: str, device: torch.device) -> Draws:
    """How draws are repeated in eager mode."""
    if device.type != "cuda":
        return _NO_DRAWS
    return Rewound(torch.cuda.default_generators[device.index])


def _position(generator: torch.Generator) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()


def _move(generator: torch.Generator, position: tuple[int, int]) -> None:
    seed, offset = position
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    generator.set_offset(offset)


class Autocast:
    """How autocast is set at this moment; as a context, it is set like that again.

    Does what ``torch.autocast`` does, for all kinds of devices that matter at once and at a fraction of its cost.
    """

    __slots__ = ("_before", "_is_changed", "_settings")

    def __init__(self, device: torch.device) -> None:
        kinds = ["cpu"]
        if device.type != "cpu" and torch.amp.is_autocast_available(device.type):
            kinds.append(device.type)
        self._settings = _settings(kinds)

    def __enter__(self) -> None:
        _, kinds = self._settings
        self._before = _settings([kind for kind, _, _ in kinds])
        is_on = any(enabled for _, _, enabled in kinds)
        self._is_changed = is_on or self._before != self._settings
        if self._is_changed:
            torch.autocast_increment_nesting()
            _set(self._settings)

    def __exit__(self, *_: object) -> None:
        if not self._is_changed:
            return
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()  # casts of parameters that the second run has made are not for others
        _set(self._before)


Settings = tuple[bool, list[tuple[str, torch.dtype, bool]]]  # caches casts; kind of device, dtype, enabled


def _settings(kinds: Sequence[str]) -> Settings:
    here = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
    return torch.is_autocast_cache_enabled(), here


def _set(settings: Settings) -> None:
    caches, kinds = settings
    torch.set_autocast_cache_enabled(caches)
    for kind, dtype, enabled in kinds:
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_enabled(kind, enabled)


class Surroundings:
    """Taken before a module's first run."""

    __slots__ = ("_autocast", "_cpu", "draws")

    def __init__(self, device: torch.device, draws: Draws) -> None:
        self._autocast, self.draws = Autocast(device), draws
        self._cpu = torch.default_generator.get_state()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        generator = torch.default_generator
        now = generator.get_state()
        generator.set_state(self._cpu)
        try:
            with self.draws, self._autocast:
                yield
        finally:
            generator.set_state(now)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once; ``nn.Module.modules`` takes three times as long."""
    found, known = [module], {module}
    for part in found:
        for child in part._modules.values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


def parameters_of(parts: Sequence[nn.Module]) -> list[tuple[nn.Parameter, int]]:
    """All parameters, each with a count of its changes in place. Under FSDP a module has others while it runs."""
    return [(item, item._version) for part in parts for item in part._parameters.values() if item is not None]


@contextlib.contextmanager
def copied_buffers(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Modules have copies of their buffers for a while; those that they have now are not touched."""
    owners = [part for part in parts if part._buffers]
    before: list[dict[str, Tensor | None]] = [dict(owner._buffers) for owner in owners]
    for owner in owners:
        owner._buffers.update({name: buffer.clone() for name, buffer in owner._buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for owner, buffers in zip(owners, before, strict=True):
            owner._buffers.update(buffers)
