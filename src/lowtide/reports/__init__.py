"""What a session did, as text, as a dict and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lowtide.controllers import Noise
from lowtide.ledger import Ledger, SiteEntry
from lowtide.reports import text


@dataclass(frozen=True, slots=True)
class Report:
    """A snapshot of a session's ledger, and of what its controller knows. ``print(report)`` shows the text.

    ``noise``: by the name of a site, the added noise of its gradient as its bound was set for, predicted and measured.
    ``events``: what happened that a user should know of, oldest first.
    """

    method: str
    totals: dict[str, Any]
    sites: tuple[SiteEntry, ...]
    noise: dict[str, Noise] = field(default_factory=dict)
    events: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, ledger: Ledger, method: str, noise: Mapping[str, Noise] | None = None, events: Sequence[str] = ()
    ) -> Report:
        sites = tuple(SiteEntry(**asdict(entry)) for entry in ledger.sites.values())
        return cls(method, ledger.totals(), sites, dict(noise or {}), tuple(events))

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "totals": dict(self.totals),
            "needs": text.shares(self.sites),
            "sites": [asdict(entry) for entry in self.sites],
            "left_alone": text.left_alone(self.sites),
            "noise": {name: asdict(noise) for name, noise in self.noise.items()},
            "events": list(self.events),
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return text.render(self.method, self.totals, self.sites, self.noise, self.events)
