"""Every error Lowtide raises on purpose: one class a cause, so that a caller can tell them apart.

A message names the owner, the rule, the value received and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LowtideError(Exception):
    """Base of all errors raised by Lowtide."""


class LowtideWarning(UserWarning):
    """Something works, but not as the caller probably meant it."""


class UnknownNameError(LowtideError, ValueError):
    """A codec, method, controller, store, model or option that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, elsewhere: str = "") -> None:
        """``elsewhere``: a sentence on where the name is known, which is better than a guess at what was meant."""
        choices = sorted(known)
        near = difflib.get_close_matches(str(name), choices, n=1)
        hint = elsewhere or (f"Did you mean {near[0]!r}?" if near else "")
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(choices) or '(none)'}. {hint}".rstrip())
        self.kind, self.name, self.known, self.elsewhere = kind, name, tuple(choices), elsewhere


class BoundError(LowtideError, ValueError):
    """An error bound that cannot be promised: zero, negative, NaN, or of the wrong shape."""


class DtypeError(LowtideError, TypeError):
    """A codec was handed a dtype it cannot store."""


class LayoutError(LowtideError, ValueError):
    """A codec was handed a tensor whose elements overlap or leave gaps in memory."""


class PayloadError(LowtideError, ValueError):
    """A payload whose contents contradict its own description: corrupted or truncated."""


class FormatVersionError(PayloadError):
    """A payload written by another version of its format."""


class PolicyError(LowtideError, ValueError):
    """A rule or rule file that does not say what it has to say."""


class AttachError(LowtideError, RuntimeError):
    """The model cannot be attached to as it stands."""


class CompileError(LowtideError, RuntimeError):
    """The model cannot be compiled as it was asked for."""


class StateError(LowtideError, ValueError):
    """A state dict that does not belong to this session."""


class BudgetError(LowtideError, RuntimeError):
    """A memory budget that no bounds can meet."""


class SizeError(LowtideError, ValueError):
    """A number of bytes, or of samples in a batch, that cannot be read or used."""


class OptimizerError(LowtideError, ValueError):
    """An optimizer's setting that makes no sense, or a gradient that it cannot use."""


class ModifiedError(LowtideError, RuntimeError):
    """A tensor needed for backward was modified in place after it was saved (as stock autograd would say)."""


class RecomputeError(LowtideError, RuntimeError):
    """A module that was run again in backward did something else than in forward."""


class GraphError(LowtideError, RuntimeError):
    """A training step that cannot be captured in a CUDA graph as it stands."""


class BoundViolationError(LowtideError, RuntimeError):
    """A decoded value lies farther from the original than its codec promised."""

    def __init__(self, site: str, promised: float, seen: float) -> None:
        super().__init__(
            f"{site}: promised |decoded - saved| <= {promised:.9g}, saw {seen:.9g}. "
            "The gradient of this step is not to be trusted; please report the site, the dtype and the bound."
        )
        self.site, self.promised, self.seen = site, promised, seen
