"""``benchmarks/products.py``: a step with remake="linear" runs more products than a plain one, by default none."""

from __future__ import annotations

from typing import Any

import pytest
from repository_scripts import load_script

TINY = {"vocab_size": 32, "context": 32, "depth": 2, "width": 32, "heads": 2}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    script = load_script("benchmarks/products.py")
    monkeypatch.setattr(script, "MODELS", {"gpt": (TINY, 32)})
    monkeypatch.setattr("sys.argv", ["products.py", "gpt", "--batch", "8", "--steps", "1", "--out", "-"])
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(script, "show", lambda made: found.extend(made) or [])
    assert script.run_script(script.__doc__, script.configure, script.run, script.show) == 0
    return found


def test_products_are_counted(rows: list[dict[str, Any]]) -> None:
    """Of a block: 2 operations for each weight, token and product, of which a step has three; queries, keys and values
    and the layer before GELU are 7 of its 12 squares of the width."""
    plain, default, linear = rows
    square, tokens = 32 * 32, 8 * 32
    blocks, head = 2 * 12 * square, 32 * 32
    assert plain["products"] == 3 * 2 * tokens * (blocks + head)
    assert default["products"] == plain["products"] and default["more"] == 0
    assert linear["products"] - plain["products"] == 2 * tokens * 2 * 7 * square
    total = plain["products"] + plain["attention"]
    assert linear["more"] == pytest.approx(2 * tokens * 14 * square / total)
    assert linear["attention"] == default["attention"] > plain["attention"]
    assert linear["smaller"] > default["smaller"] > 1
