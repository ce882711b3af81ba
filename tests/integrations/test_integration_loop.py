"""The loop of the tutorial, and the code on its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_an_own_loop(run_example, assert_compressed, capsys):
    tide = run_example("own_loop", epochs=2)
    assert_compressed(tide)
    tide.detach()
    shown = capsys.readouterr().out
    accuracy = float(re.findall(r"test accuracy ([\d.]+) %", shown)[-1])
    assert accuracy > 60 and "left alone, because" in shown


@pytest.mark.parametrize("page", ["tutorial", "choosing"])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """The Python blocks of a page are one program."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    exec(compile("\n".join(blocks), f"docs/{page}.md", "exec"), {"__name__": "__main__"})
    assert "Lowtide, method" in capsys.readouterr().out
