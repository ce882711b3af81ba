"""Who decides how large an error may be. The table of bounds is frozen during a step and changes only between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lowtide.bounds import BoundSource
from lowtide.codecs import Codec
from lowtide.ledger import Ledger
from lowtide.records import Need, Site
from lowtide.statistics import Statistics, Wish


@dataclass(frozen=True, slots=True)
class Keep:
    """In place of a bound: these values are kept as they are, for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Noise:
    """Added variance of a gradient as a share of its energy, at the last update.

    ``predicted``: of the parameter that the site's values serve, under the bound in force; ``share``: what the method
    allows; ``measured``: what a check in step ``checked`` found. ``propagated``: predicted for the gradient that goes
    on to the layers below.
    """

    share: float | None = None
    predicted: float | None = None
    measured: float | None = None
    checked: int | None = None
    propagated: float | None = None


class Controller(Protocol):
    """Chooses bounds; its whole state fits into a checkpoint."""

    def bound(self, site: Site, need: Need) -> BoundSource | Keep:
        """The bound for values saved at ``site`` during this step."""
        ...

    def wants(self, step: int) -> Wish | None:
        """What is to be measured during step ``step``, which is about to begin."""
        ...

    def step(self, number: int, statistics: Statistics | None, ledger: Ledger) -> bool:
        """Step ``number`` has ended: bounds may change now. Whether any did.

        ``statistics`` are those of the step before, if it was measured.
        """
        ...

    def noise_by_site(self) -> Mapping[str, Noise]:
        """By the name of a site, for the report."""
        ...

    def events(self) -> Sequence[str]:
        """What happened that a user should know of, oldest first."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class ChoosesCodec(Protocol):
    """A controller for codecs that take no bound: what it chooses is the codec itself, with more or fewer bits."""

    def codec(self, site: Site, need: Need, values: Codec | None) -> Codec | None:
        """For values saved at ``site``; ``values`` is the method's codec, None keeps them as they are."""
        ...
