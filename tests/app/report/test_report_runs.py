"""Run folders are read as they were written, also when the run was stopped; what is wrong is named."""

from __future__ import annotations

import json

import pytest

from lowtide.app.report.runs import RunError, load_runs, read_run
from lowtide.app.shared.specs import UsageError


def test_a_whole_run(make_run):
    run = read_run(make_run("first", method="fixed", ratio=8.0))
    assert (run.name, run.method, run.model, run.is_plain) == ("first", "fixed", "resnet18", False)
    assert (len(run.steps), len(run.evals), len(run.memory), len(run.sites)) == (30, 3, 6, 3)
    assert run.layers == run.sites[-1]["sites"] and run.sites[-1]["step"] == 30
    assert run.result["seed"] == 0 and run.environment["torch"] == "2.13.0" and not run.notes
    assert run.noise == {} and run.events == []


def test_what_a_controller_knows_comes_with_the_sites(make_run):
    folder = make_run("first", method="budget", ratio=8.0)
    record = json.loads((folder / "sites.jsonl").read_text().splitlines()[-1])
    record |= {"noise": {"bn1:native_batch_norm.input": {"share": 0.01}}, "events": ["step 3: something happened"]}
    (folder / "sites.jsonl").write_text(json.dumps(record) + "\n")
    run = read_run(folder)
    assert run.noise == record["noise"] and run.events == record["events"]


def test_the_method_of_a_run_without_a_result_is_that_of_its_configuration(make_run):
    run = read_run(make_run("stopped", method="fixed", ratio=8.0, without=["result.json"]))
    assert run.method == "fixed"
    assert run.notes == ("The run has no result.json: it is still going on, or it was stopped.",)


def test_files_that_are_not_there_are_empty(make_run):
    names = ("config.toml", "environment.json", "result.json", "memory.jsonl")
    run = read_run(make_run(without=names))
    assert run.config == run.environment == run.result == {} and run.memory == [] and run.sites == []
    assert run.is_plain


def test_a_last_line_that_is_cut_off_is_left_out_and_noted(make_run):
    folder = make_run()
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "step", "ste')
    run = read_run(folder)
    assert len(run.steps) == 30
    assert run.notes == ("The last line of metrics.jsonl is cut off and was left out.",)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", '{"kind": "step"\n{"kind": "step"}\n', r"metrics.jsonl:1 is not JSON"),
        ("metrics.jsonl", '{"kind": "stpe"}\n', r"metrics.jsonl:1: kind is 'step' or 'eval', here it is 'stpe'"),
        ("metrics.jsonl", "[1]\n", r"metrics.jsonl:1: a line is an object, here it is list"),
        ("sites.jsonl", '{"step": 1}\n', r"sites.jsonl:1: 'sites' is a list of rows with names"),
        ("sites.jsonl", '{"sites": [{"codec": "sz"}]}\n', r"sites.jsonl:1: 'sites' is a list of rows with names"),
        ("result.json", '{"accuracy": 0.9', r"result.json cannot be read"),
        ("result.json", "[]", r"result.json holds an object, here it is list"),
        ("config.toml", "model = ", r"config.toml cannot be read"),
    ],
)
def test_a_file_that_contradicts_its_format_is_named(make_run, file, text, message):
    folder = make_run()
    (folder / file).write_text(text)
    with pytest.raises(RunError, match=message):
        read_run(folder)


def test_a_file_that_is_not_text(make_run):
    folder = make_run()
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match=r"metrics.jsonl is not text"):
        read_run(folder)


def test_a_folder_of_runs_is_all_of_them_with_the_plain_ones_first(make_run, tmp_path):
    make_run("all/b-plain")
    make_run("all/a-fixed", method="fixed", ratio=8.0)
    (tmp_path / "all" / "notes").mkdir()
    assert [run.name for run in load_runs([tmp_path / "all"])] == ["b-plain", "a-fixed"]


def test_runs_are_in_the_order_given_and_each_once(make_run):
    ours, plain = make_run("ours", method="fixed", ratio=8.0), make_run("plain")
    assert [run.name for run in load_runs([ours, plain, ours])] == ["ours", "plain"]


def test_names_are_as_long_as_it_takes_to_tell_runs_apart(make_run):
    runs = load_runs([make_run("one/run"), make_run("two/run")])
    assert [run.name for run in runs] == ["one/run", "two/run"]


def test_what_is_no_run(make_run, tmp_path):
    make_run("plain")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"there is no folder .*plian. Did you mean .*plain\?"):
        load_runs([tmp_path / "plian"])
    with pytest.raises(UsageError, match=r"there is no folder .*far/away$"):
        load_runs([tmp_path / "far" / "away"])
    with pytest.raises(UsageError, match=r"empty is no run folder and holds none: there is no metrics.jsonl"):
        load_runs([tmp_path / "empty"])
    with pytest.raises(UsageError, match=r"file is a file; a run is a folder"):
        load_runs([tmp_path / "file"])
