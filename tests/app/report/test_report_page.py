"""The page is whole, needs nothing from elsewhere, escapes what it shows, and has the numbers of the runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from lowtide.app.report.markdown import render_markdown
from lowtide.app.report.page import render_page
from lowtide.app.report.record import render_json
from lowtide.app.report.runs import Run, load_runs, read_run

VOID = ("meta", "link", "br", "hr", "img", "input")


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects texts, attributes and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> does not close {self.open[-3:]}"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def runs(make_run) -> list[Run]:
    plain = make_run("plain", accuracy=0.9512)
    ours = make_run("ours", method="fixed", accuracy=0.9487, ratio=8.0)
    return load_runs([plain, ours])


def test_the_page_is_well_formed_and_its_links_lead_somewhere(runs):
    page = Page(render_page(runs))
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    targets = [value for tag, key, value in page.attributes if tag == "a" and key == "href"]
    assert len(targets) >= 5 and all(target.startswith("#") and target[1:] in ids for target in targets)
    described = [value for _, key, value in page.attributes if key in ("aria-describedby", "aria-labelledby")]
    assert described and set(described) <= set(ids)


def test_nothing_is_loaded_from_elsewhere(runs):
    text = render_page(runs)
    page = Page(text)
    assert not [item for item in page.attributes if item[1] in ("src", "srcset", "data", "action")]
    assert not re.findall(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert ("meta", "content", "default-src 'none'") in [
        (tag, key, value.split(";")[0]) for tag, key, value in page.attributes
    ]


def test_the_numbers_are_those_of_the_runs(runs):
    text = Page(render_page(runs)).text
    assert "ours fixed 94.87 % -0.25 95.87 % 16.00 MiB 2.00 MiB 8.00x 10.00 MiB 12.5 s" in text
    assert "plain plain 95.12 % 96.12 % 16.00 MiB 24.00 MiB 12.5 s" in text
    assert "8.0x less held between forward and backward" in text and "-0.25 points test accuracy" in text
    assert "2.4x less at the peak of a step" in text
    assert "plain ends at 95.12 %, ours ends at 94.87 %" in text
    assert "plain has its peak of 5.00 MiB in backward" in text


def test_every_chart_has_its_points_as_a_table_and_for_the_keyboard(runs):
    text = render_page(runs)
    charts = re.findall(r'<figure class="chart" id="([\w-]+)">', text)
    assert charts == ["accuracy", "test-loss", "loss", "ratio", "step-memory"]
    data = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert [[series["name"] for series in chart["series"]] for chart in data] == [
        ["plain", "ours"], ["plain", "ours"], ["plain", "ours"], ["ours"], ["plain", "ours"],
    ]  # fmt: skip
    assert [point[2:] for point in data[0]["series"][1]["points"]] == [
        ["1", "74.87 %"], ["2", "84.87 %"], ["3", "94.87 %"],
    ]  # fmt: skip
    assert text.count("Data of this chart as a table") == len(charts)
    shown = Page(text).text
    assert "epoch plain: accuracy ours: accuracy 1 75.12 % 74.87 % 2 85.12 % 84.87 % 3 95.12 % 94.87 %" in shown


def test_layers_and_what_was_left_alone(runs):
    text = Page(render_page(runs)).text
    assert "bn1:native_batch_norm.input sz 0.4 std 8.00 MiB 1.30 MiB 6.15x" in text
    assert "pool:max_pool2d_with_indices.self shape exact 1.00 MiB 0 B" in text
    assert "recurrent op 1 1.00 MiB" in text and "smaller than min_size 2 64 B" in text
    assert "bn1 (smaller than min_size)" not in text  # it is in the list by reason
    assert "values 2 12.00 MiB 1.95 MiB 6.15x" in text


def test_noise_and_events_of_a_controller(make_run):
    folder = make_run("ours", method="budget", ratio=8.0)
    record = json.loads((folder / "sites.jsonl").read_text().splitlines()[-1])
    noise = {"share": 0.01, "predicted": 0.0098, "measured": 0.0102, "checked": 30}
    record |= {"noise": {"conv2:convolution.input": noise}, "events": ["step 12: conv2 returned to exact storage"]}
    (folder / "sites.jsonl").write_text(json.dumps(record) + "\n")
    runs = [read_run(folder)]
    text = Page(render_page(runs)).text
    assert "noise allowed predicted measured" in text and "1 % 0.98 % 1.02 %" in text
    assert "step 12: conv2 returned to exact storage" in text
    markdown = render_markdown(runs)
    assert "| 1 % | 0.98 % | 1.02 % |" in markdown and "- step 12: conv2 returned" in markdown


def test_hostile_names_stay_text(make_run):
    folder = make_run("ours", method="fixed", ratio=8.0)
    evil = "</script><script>alert(1)</script>"
    lines = (folder / "sites.jsonl").read_text().replace("bn1:native", f"{evil}:native".replace('"', '\\"'))
    (folder / "sites.jsonl").write_text(lines)
    (folder / "memory.jsonl").write_text(
        json.dumps({"phase": "forward", "at": 0, "label": evil, "allocated": 5}) + "\n"
    )
    (folder / "result.json").write_text(json.dumps({"method": evil, "accuracy": 0.5}))
    text = render_page([read_run(folder, name="<b>&\"'")])
    assert "<script>alert" not in text and "<b>" not in text.replace("<b>8.0x", "").replace("<b>1.0x", "")
    assert text.count("</script>") == text.count("<script")
    Page(text)


@pytest.mark.parametrize(
    ("without", "gone"),
    [
        (["memory.jsonl"], ["step-memory"]),
        (["sites.jsonl"], []),
        (["result.json", "config.toml", "environment.json"], []),
    ],
)
def test_a_page_without_some_files(make_run, without, gone):
    text = render_page([read_run(make_run("ours", method="fixed", ratio=8.0, without=without))])
    Page(text)
    assert not any(f'id="{ident}"' in text for ident in gone)
    assert ("No run has recorded its layers." in text) == ("sites.jsonl" in without)
    assert ("The run has no result.json" in text) == ("result.json" in without)


def test_a_run_that_has_written_nothing_yet(make_run):
    folder = make_run(without=["memory.jsonl"])
    (folder / "metrics.jsonl").write_text("")
    text = render_page([read_run(folder)])
    Page(text)
    assert "No run has recorded a loss or an evaluation yet." in text and "No run has recorded memory." in text


def test_markdown_has_the_same_tables(runs):
    text = render_markdown(runs)
    assert (
        "| ours | fixed | 94.87 % | -0.25 | 95.87 % | 16.00 MiB | 2.00 MiB | 8.00x | 10.00 MiB | 12.5 s | 116 |" in text
    )
    assert "| bn1:native_batch_norm.input | sz | 0.4 std | 8.00 MiB | 1.30 MiB | 6.15x |" in text
    assert "| recurrent op | 1 | 1.00 MiB |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_json_has_everything_and_is_json(runs):
    runs[1].steps[0]["loss"] = float("nan")
    record = json.loads(render_json(runs), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["version"] == 1
    first, second = record["runs"]
    assert first["summary"]["accuracy"] == 0.9512 and second["summary"]["difference"] == pytest.approx(-0.25)
    assert second["steps"][0]["loss"] is None and len(second["steps"]) == 30
    assert second["sites"][-1]["sites"][0]["held_nbytes"] == round(1.3 * (1 << 20))


def _luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_told_from_the_page_in_light_and_dark():
    """WCAG 2.2: 4.5 to 1 for text (lines carry labels in their colour), 3 to 1 for bars."""
    css = resources.files("lowtide.app.report").joinpath("style.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part)) for part in css.split("@media", 1))
    for colours in (light, dark):
        for name, least in {**{f"s{index}": 4.5 for index in range(8)}, "ink": 7, "soft": 4.5, "focus": 3,
                            "held": 3, "good": 4.5, "bad": 4.5, "plain": 2}.items():  # fmt: skip
            for ground in ("page", "panel"):
                one, other = sorted((_luminance(colours[name]), _luminance(colours[ground])))
                assert (other + 0.05) / (one + 0.05) >= least, f"{name} {colours[name]} on {ground} {colours[ground]}"
