"""Compile a model in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lowtide.capture.hooks import Capture
from lowtide.compiled.backend import BACKENDS, Backend
from lowtide.compiled.calls import Calls
from lowtide.compiled.holding import Desk
from lowtide.errors import CompileError, UnknownNameError
from lowtide.pipeline import Pipeline

_REPLAYING = ("reduce-overhead", "max-autotune")


def refuse(
    modules: Sequence[nn.Module], calls: Calls | None, regions: Any, graphs: Collection[Any], *, products: bool
) -> None:
    """What a session is attached to, has compiled, runs again and replays: say why it cannot be compiled, if so."""
    if not modules:
        raise CompileError("compile() needs a model that Lowtide is attached to")
    if calls is not None:
        raise CompileError("this model is compiled already; detach() and attach() anew to compile it otherwise")
    if regions is not None:
        raise CompileError(
            "recompute runs modules again in backward, which a compiled graph cannot ask for; use "
            "torch.utils.checkpoint in the model, which torch.compile understands"
        )
    if products:
        raise CompileError(
            "remake='linear' runs linear layers again in eager backward only; attach with remake=True to "
            "compile the model"
        )
    if graphs:
        raise CompileError("compile() before graph(): a step that was captured has no more to be compiled")


def start(
    model: nn.Module,
    pipeline: Pipeline,
    capture: Capture,
    aside: Callable[[], AbstractContextManager[None]],
    *,
    backend: str,
    options: dict[str, Any],
) -> Calls:
    """From now on, calls of ``model`` run compiled. ``options`` are those of ``torch.compile``."""
    from torch._inductor import list_mode_options

    if backend not in BACKENDS:
        raise UnknownNameError("backend", str(backend), BACKENDS)
    mode, given = options.pop("mode", None), dict(options.pop("options", None) or {})
    if mode in _REPLAYING or given.get("triton.cudagraphs"):
        raise CompileError(
            f"{mode or 'triton.cudagraphs'} replays CUDA graphs of its own, in which Lowtide's ops would not run; use "
            "'max-autotune-no-cudagraphs' or leave it out, and graph() of the session for CUDA graphs"
        )
    if mode is not None:
        known = list_mode_options()
        if mode not in known:
            raise UnknownNameError("mode", str(mode), [name for name in known if name not in _REPLAYING])
        given = {**known[mode], **given}
    desk = Desk(pipeline, capture.min_size, *capture.makes_again())
    maker = Backend(model, desk, backend, given)
    calls = Calls(model, maker, lambda: capture.on_named is not None, aside, options)
    model._compiled_call_impl = calls
    return calls
