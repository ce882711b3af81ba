"""Text to numbers, without training a tokeniser: bytes, or words separated by spaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PADDING, UNKNOWN = 0, 1
_RESERVED = 2


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The most frequent words of a training text; number 0 pads, number 1 is any other word."""

    numbers: dict[str, int]

    @classmethod
    def of(cls, texts: Iterable[str], limit: int) -> Vocabulary:
        """At most ``limit`` numbers. Words that are equally frequent are taken in alphabetical order: the same data
        give the same numbers."""
        counts = Counter(word for text in texts for word in text.split())
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls({word: _RESERVED + rank for rank, (word, _) in enumerate(ranked[: limit - _RESERVED])})

    def __len__(self) -> int:
        return _RESERVED + len(self.numbers)

    def encode(self, text: str) -> list[int]:
        return [self.numbers.get(word, UNKNOWN) for word in text.split()]
