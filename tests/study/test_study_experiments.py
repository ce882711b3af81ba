"""Tables of the study: what they ask for, and when two runs are the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from experiments import Experiment, Variant, merge
from outcomes import name_file

from lowtide.app.shared.specs import UsageError
from lowtide.errors import UnknownNameError

STUDY = Path(__file__).parents[2] / "study"

TABLES = (
    *("caltech101_resnet18", "cifar10_alexnet", "cifar10_resnet18", "cifar10_resnet50", "cifar10_resnet50_steady"),
    *("cifar10_vgg16", "sst2_encoder", "wikitext2_gpt"),
)


def test_all_that_is_promised_has_a_table():
    assert tuple(sorted(path.stem for path in STUDY.glob("*.toml"))) == TABLES


@pytest.mark.parametrize("name", TABLES)
def test_every_table_compares_the_default_with_plain_training(name):
    experiment = Experiment.read(STUDY / f"{name}.toml")
    plain, default = experiment.variants[:2]
    assert plain.name == "plain" and default.text.split(" = ")[0] == "budget"
    few = ("cifar10_resnet50", "cifar10_resnet50_steady", "wikitext2_gpt")
    seeds = 3 if name in few else {"cifar10_alexnet": 10, "cifar10_resnet18": 10}.get(name, 5)
    assert plain.seeds == default.seeds == seeds
    assert experiment.metric == ("loss" if name == "wikitext2_gpt" else "accuracy")


@pytest.mark.parametrize("name", TABLES)
def test_pictures_are_tested_with_their_mirror_images_as_the_page_says(name):
    settings = Experiment.read(STUDY / f"{name}.toml").settings
    has_pictures = settings["data"]["name"] in ("cifar10", "imagefolder")
    assert settings.get("augment", {}).get("test_mirror", False) is has_pictures


def test_resnet18_has_the_rivals_and_the_curve_of_the_noise():
    variants = Experiment.read(STUDY / "cifar10_resnet18.toml").variants
    assert all(variant.seeds >= 3 for variant in variants)
    budgets = [variant.options for variant in variants if variant.name == "budget"]
    now = [options for options in budgets if options["flow"]]
    assert sorted(options["noise"] for options in now if options["pairs"] is None) == [0.001, 0.01, 0.02, 0.03, 0.1]
    assert sorted(options["noise"] for options in budgets if options["pairs"] is False) == [0.01, 0.03, 0.1]
    assert {variant.name for variant in variants} == {"plain", "budget", "comet", "acgc", "division", "actnn"}


def test_one_method_written_twice_is_one():
    default = Variant.read("budget", 5).options["noise"]
    merged = merge([Variant.read("budget", 5), Variant.read("plain", 1), Variant.read(f"budget(noise={default})", 7)])
    assert [(item.text, item.seeds) for item in merged] == [(f"budget = budget(noise={default})", 7), ("plain", 1)]


def test_a_row_belongs_to_what_was_run_and_not_to_how_it_was_written():
    default = Variant.read("budget", 1)
    row = {"method": "budget", "options": default.written_options}
    assert default.is_of(row) and Variant.read(f"budget(noise={default.options['noise']})", 1).is_of(row)
    assert not Variant.read("budget(noise=0.5)", 1).is_of(row)
    assert not Variant.read("plain", 1).is_of(row)
    assert not default.is_of({**row, "options": json.dumps({**default.options, "recast": False})})
    older = {name: value for name, value in default.options.items() if name != "retreat"}
    assert default.is_of({**row, "options": json.dumps(older)}), "an option that came later is at its default there"


def test_files_of_an_old_default_are_not_overwritten(tmp_path):
    """`budget` meant something else once: its curves stay, under the name they have."""
    experiment = _read(tmp_path, SMALL)
    now = Variant.read("budget", 1)
    once = replace(now, options={**now.options, "noise": 0.5})
    other = _read(tmp_path, SMALL.replace("epochs = 3", "epochs = 4"))
    names = [name_file(experiment, now, 0), name_file(experiment, once, 0), name_file(other, now, 0)]
    assert len(set(names)) == 3 and all(name.startswith("budget-0-") for name in names)


def _read(tmp_path: Path, text: str) -> Experiment:
    path = tmp_path / "one.toml"
    path.write_text(text)
    return Experiment.read(path)


SMALL = "[study.methods]\nplain = 1\n[data]\nname = 'cifar10'\npath = 'there'\n[train]\nepochs = 3\n"


def test_the_key_is_that_of_the_settings_alone(tmp_path):
    key = _read(tmp_path, SMALL).key
    assert _read(tmp_path, SMALL.replace("plain = 1", "plain = 2\nexact = 1")).key == key
    assert _read(tmp_path, SMALL + "[run]\nlog_every = 5\n").key == key
    assert _read(tmp_path, SMALL.replace("epochs = 3", "epochs = 4")).key != key


def test_data_are_found_in_the_folder_that_is_named(tmp_path):
    experiment = _read(tmp_path, SMALL)
    assert experiment.configure(tmp_path / "data", "cpu").data.path == str(tmp_path / "data" / "there")


def test_seeds_come_in_pairs(tmp_path):
    experiment = _read(tmp_path, SMALL.replace("plain = 1", "plain = 2\nexact = 3\nlossless = 1"))
    config = experiment.configure(tmp_path, None)
    runs = [(variant.name, run.seed) for variant, run in experiment.runs(config)]
    assert runs == [("plain", 0), ("exact", 0), ("lossless", 0), ("plain", 1), ("exact", 1), ("exact", 2)]
    assert [variant.name for variant, _ in experiment.runs(config, ["lossless"])] == ["lossless"]
    with pytest.raises(UnknownNameError, match=r"unknown method of one 'exakt'.*Did you mean 'exact'"):
        experiment.runs(config, ["exakt"])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[train]\nepochs = 3", UsageError, r"no section \[study.methods\]"),
        ("[study]\nmetric = 'loss'", UsageError, r"no section \[study.methods\]"),
        (SMALL.replace("[study.methods]", "[study]\ntitel = 'x'\n[study.methods]"), UnknownNameError, "titel"),
        (
            SMALL.replace("[study.methods]", "[study]\nmetric = 'los'\n[study.methods]"),
            UnknownNameError,
            "metric 'los'",
        ),
        (SMALL.replace("plain = 1", "plain = 0"), UsageError, "'plain' is given a number of seeds, 1 or more; got 0"),
        (SMALL.replace("plain = 1", "plian = 1"), UnknownNameError, "unknown method 'plian'"),
        (SMALL.replace("epochs", "epocs"), UnknownNameError, "epocs"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, error, message):
    with pytest.raises(error, match=message):
        _read(tmp_path, text)
