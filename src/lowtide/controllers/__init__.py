"""Who decides how large an error may be. The table of bounds is frozen during a step and changes only between steps."""

from __future__ import annotations

from typing import Any, Protocol

from lowtide.bounds import BoundSource
from lowtide.records import Need, Site


class Controller(Protocol):
    """Chooses bounds; its whole state fits into a checkpoint."""

    def bound(self, site: Site, need: Need) -> BoundSource:
        """The bound for values saved at ``site`` during this step."""
        ...

    def step(self, number: int) -> bool:
        """Step ``number`` has ended: bounds may change now. Whether any did."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
