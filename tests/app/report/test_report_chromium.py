"""The page in a real browser: no errors, drawn in light and dark, usable by keyboard.

Needs Chromium (``apt-get install chromium``, or CHROMIUM=/path/to/it); nothing else is installed for it.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.app.report.page import render_page
from lowtide.app.report.runs import load_runs

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
SCHEMES = {"dark": 0, "light": 1}

# Appended to the page: acts as a person would, and leaves what it saw for --dump-dom.
ACTOR = """
<script>
const press = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const seen = {};
const plot = document.querySelector("#accuracy .plot");
plot.focus();
seen.focused = document.activeElement === plot;
press(plot, "ArrowRight"); seen.first = plot.querySelector(".readout").textContent;
press(plot, "ArrowRight"); seen.second = plot.querySelector(".readout").textContent;
press(plot, "End"); seen.last = plot.getAttribute("aria-valuetext");
press(plot, "ArrowRight"); seen.beyond = plot.getAttribute("aria-valuenow");
press(plot, "ArrowLeft"); seen.back = plot.getAttribute("aria-valuetext");
seen.cursor = plot.querySelector(".cursor").getAttribute("visibility");
press(plot, "Escape"); seen.hidden = plot.querySelector(".cursor").getAttribute("visibility");
const memory = document.querySelector("#step-memory .plot");
for (let count = 0; count < 5; count += 1) press(memory, "ArrowRight");
seen.memory = memory.getAttribute("aria-valuetext");
const box = plot.querySelector("svg").getBoundingClientRect();
plot.querySelector("svg").dispatchEvent(
  new PointerEvent("pointermove", { clientX: box.left + box.width - 2, clientY: box.top + 20, bubbles: true }));
seen.hovered = plot.querySelector(".readout").textContent;
const table = document.querySelector("table.sortable");
const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
seen.unsorted = names();
const heads = [...table.querySelectorAll("button")];
const held = heads.find((head) => head.textContent === "held");
held.click(); seen.byHeld = names();
held.click(); seen.byHeldUp = names();
heads[0].click(); seen.byName = names();
seen.sort = heads[0].parentElement.getAttribute("aria-sort");
seen.lines = document.querySelectorAll(".plot path").length;
seen.width = document.documentElement.scrollWidth;
seen.window = window.innerWidth;
seen.page = getComputedStyle(document.body).backgroundColor;
seen.ink = getComputedStyle(document.body).color;
seen.stops = [...document.querySelectorAll("a, button, summary, [tabindex]")].filter((e) => e.tabIndex >= 0).length;
document.body.setAttribute("data-seen", JSON.stringify(seen));
</script>
"""


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Opens a page and acts on it; what was seen, with the messages of the console."""

    def run(text: str, scheme: str = "light", width: int = 1100) -> dict[str, Any]:
        path = tmp_path / "acted.html"
        path.write_text(text.replace("</body>", f"{ACTOR}</body>"), encoding="utf-8")
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--window-size={width},1400",
            "--dump-dom", path.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        found = re.search(r'data-seen="([^"]*)"', done.stdout)
        console = re.findall(r":CONSOLE.*", done.stderr)
        assert found, f"the page was not acted on: {console or done.stderr[-2000:]}"
        return {**json.loads(html.unescape(found[1])), "console": console}

    return run


@pytest.fixture
def page(make_run) -> str:
    plain = make_run("plain", accuracy=0.9512)
    return render_page(load_runs([plain, make_run("ours", method="fixed", accuracy=0.9487, ratio=8.0)]))


def test_the_page_in_a_browser(look, page):
    seen = look(page)
    assert seen["console"] == []
    assert seen["focused"] and seen["cursor"] == "visible" and seen["hidden"] == "hidden"
    assert seen["first"] == "epoch 1: plain 75.12 %, ours 74.87 %"
    assert seen["second"] == "epoch 2: plain 85.12 %, ours 84.87 %"
    assert seen["last"] == seen["hovered"] == "epoch 3: plain 95.12 %, ours 94.87 %"
    assert seen["beyond"] == "2" and seen["back"] == seen["second"]
    assert seen["memory"] == "module layer3: plain 5.00 MiB, ours 5.00 MiB"
    assert seen["lines"] == 9
    assert seen["width"] <= seen["window"] and seen["stops"] > 15


def test_a_table_is_sorted_by_its_heads(look, page):
    seen = look(page)
    largest = ["lstm:mkldnn_rnn_layer.input", "bn1:native_batch_norm.input"]
    assert seen["byHeld"][0] == "bn1:native_batch_norm.input" and seen["byHeld"][1] == largest[0]
    assert seen["byHeldUp"] != seen["byHeld"] and seen["byHeldUp"][-1] == seen["byHeld"][0]
    assert seen["byName"] == sorted(seen["unsorted"]) and seen["sort"] == "ascending"


def test_light_dark_and_narrow(look, page):
    light, dark = look(page, "light"), look(page, "dark", width=500)
    assert (light["page"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(22, 32, 42)")
    assert (dark["page"], dark["ink"]) == ("rgb(18, 23, 28)", "rgb(232, 237, 242)")
    assert dark["console"] == [] and dark["width"] <= dark["window"]


def test_a_script_that_fails_is_noticed(look, page):
    """The test of the test: an error on the page reaches the console that the others look at."""
    seen = look(page.replace("</main>", "<script>undefinedFunction()</script></main>"))
    assert any("undefinedFunction is not defined" in line for line in seen["console"])
