"""The ways to run a training step that are compared: plain, checkpointed, compiled, or with Lowtide.

``checkpoint`` puts ``torch.utils.checkpoint`` (``use_reentrant=False``) around every block. A block is a module with
children that stands in an ``nn.Sequential`` or ``nn.ModuleList``, unless it is itself such a chain of blocks: then they
count. In a ResNet these are the residual blocks, in a transformer its layers, in a U-Net the levels.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.app.shared.specs import Spec, UsageError
from lowtide.app.shared.workload import Task
from lowtide.errors import LowtideError, UnknownNameError
from lowtide.graphs.step import GraphStep, graph_plainly
from lowtide.recompute import blocks
from lowtide.registry import METHODS
from lowtide.session import Session, attach

OTHERS = ("plain", "checkpoint", "compile")
PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bold": ("fixed", {"linear": "1.0 std", "norm": "1.0 std", "log_probability": "0.1"}),
    "careful": (
        "fixed",
        {
            **dict.fromkeys(("linear", "norm", "attention", "product", "pointwise"), "0.4 std"),
            "log_probability": "0.05",
        },
    ),
}
_RESERVED = ("optimizer", "check", "seed", "compile")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a step. ``method`` and ``options`` are Lowtide's; without a method Lowtide is not attached."""

    text: str
    method: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    is_graphed: bool = False  # forward and backward are replayed as a CUDA graph
    is_beside: bool = False  # within it, encoders and decoders run beside the step
    is_compiled: bool = False  # by torch.compile, with what Lowtide holds inside of its graphs

    @classmethod
    def parse(cls, text: str) -> Variant:
        """``plain``, ``bold``, ``bold:blocks`` (its coder), ``fixed(linear=0.4 std, coder=rans)``, ``exact``, ..."""
        spec = Spec.parse(text)
        given = {**spec.options, **({"coder": spec.short} if spec.short else {})}
        is_graphed = spec.name != "checkpoint" and given.pop("graph", False) is True
        is_beside = is_graphed and spec.name not in OTHERS and given.pop("beside", False) is True
        is_compiled = spec.name not in OTHERS and given.pop("compile", False) is True
        if spec.name in OTHERS:
            if given:
                known = "no options" if spec.name == "checkpoint" else "no options but graph=true"
                raise UsageError(f"{spec.name!r} has {known}; got {text!r}")
            return cls(spec.text, is_graphed=is_graphed)
        found = find_method(spec.name, given, reserved=_RESERVED, others=OTHERS, what=repr(text))
        return cls(spec.text, *found, is_graphed, is_beside, is_compiled)

    @property
    def is_torchs_own(self) -> bool:
        """Compiled by torch.compile, without Lowtide."""
        return not self.method and self.text.startswith("compile")

    @property
    def is_exact(self) -> bool:
        """Whether losses are to equal those of plain training, bit by bit; compiled kernels round otherwise."""
        return self.method in ("exact", "lossless", "offload") and not self.is_compiled

    def prepare(self, task: Task) -> None:
        """Change a new task's model, where this is not Lowtide's or plain training."""
        if self.text == "checkpoint":
            checkpoint_blocks(task.model)
        elif self.is_torchs_own:
            task.call = torch.compile(task.model)

    @contextlib.contextmanager
    def attached(self, task: Task, *, seed: int, check: bool = False, warm: int = 8) -> Iterator[Session | None]:
        """Lowtide on the task's model for a while, if this variant is one of Lowtide's.

        A graph is captured before ``warm`` steps have gone by: as late as the defaults of ``Session.graph`` if it can
        be, since in its first steps a net changes fast.
        """
        make: Callable[..., GraphStep] | None = None
        warmup = max(3, min(12, warm - 4))
        if not self.method:
            if self.is_graphed and not check:
                make = partial(graph_plainly, task.model, warmup=warmup)
            with _graphed(task, make):
                yield None
            return
        session = attach(
            task.model, self.method, optimizer=task.optimizer, seed=seed, check=check, **dict(self.options)
        )
        if self.is_compiled:
            session.compile()
        if self.is_graphed and not check:
            make = partial(session.graph, warmup=warmup, beside=self.is_beside)
        task.session = session
        try:
            with _graphed(task, make):
                yield session
        finally:
            task.session = None
            session.detach()


@contextlib.contextmanager
def _graphed(task: Task, make: Callable[..., GraphStep] | None) -> Iterator[None]:
    """The task's forward and backward as the graph that is made of them, if one is, for a while."""
    if make is not None:
        task.graphed = make(task.pass_through)
    try:
        yield
    finally:
        task.graphed = None


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint every block of a model; how many there are. A model without any is refused."""
    found = [block for _, block in blocks(model)]
    if not found:
        raise UsageError("checkpoint: this model has no blocks in an nn.Sequential or nn.ModuleList")
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(found)


def find_method(
    name: str, options: Mapping[str, Any], *, reserved: Iterable[str], others: Iterable[str], what: str
) -> tuple[str, dict[str, Any]]:
    """A method of Lowtide, or what a preset stands for, with all its options.

    Options that it does not have are refused, before anything is loaded or built, and so are those that are
    ``reserved``. ``others`` are names that would have been understood, too; ``what`` is how the user has put it.
    """
    if name not in PRESETS and name not in METHODS.names():
        raise UnknownNameError("method", name, [*others, *PRESETS, *METHODS.names()])
    method, preset = PRESETS.get(name, (name, {}))
    given = {**preset, **options}
    for key in reserved:
        if key in given:
            raise UsageError(f"{what}: {key} is set by the command itself")
    try:
        Session(None, method, **given)
    except UnknownNameError as error:
        if "option" not in error.kind:
            raise
        known = [key for key in [*error.known, *session_options()] if key not in reserved]
        raise UnknownNameError(error.kind, error.name, known, elsewhere=error.elsewhere) from None
    except (LowtideError, ValueError, TypeError, OSError) as error:
        raise UsageError(f"{what}: {error}") from error
    return method, given


def session_options() -> list[str]:
    """The options that every method takes, those of ``attach`` itself."""
    parameters = inspect.signature(Session).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
