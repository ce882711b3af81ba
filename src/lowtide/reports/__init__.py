"""What a session did, as text, as a dict and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.ledger import Ledger, SiteEntry
from lowtide.reports import text


@dataclass(frozen=True, slots=True)
class Report:
    """A snapshot of a session's ledger. ``print(report)`` shows the text."""

    method: str
    totals: dict[str, Any]
    sites: tuple[SiteEntry, ...]

    @classmethod
    def of(cls, ledger: Ledger, method: str) -> Report:
        return cls(method, ledger.totals(), tuple(SiteEntry(**asdict(entry)) for entry in ledger.sites.values()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "totals": dict(self.totals),
            "needs": text.shares(self.sites),
            "sites": [asdict(entry) for entry in self.sites],
            "left_alone": text.left_alone(self.sites),
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return text.render(self.method, self.totals, self.sites)
