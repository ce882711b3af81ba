"""``lowtide train`` as a command: its help, and one line for whatever is wrong, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

_DIGITS = ("--model", "resnet18", "--data", "digits")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_reads_well_in_80_columns(lowtide, capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert lowtide(command, "--help") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "examples:" in shown and "default: None" not in shown and "==SUPPRESS==" not in shown
    for flag in ("--model NAME", "--data NAME", "--precision NAME", "--lr X", "--config PATH", "--out FOLDER"):
        assert flag in shown
    undocumented = re.findall(r"^  (--[\w-]+)(?: [A-Z=]+)?$\n(?!  +\w)", shown, re.MULTILINE)
    assert not undocumented


def test_help_tells_the_defaults(lowtide, capsys):
    assert lowtide("train", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("--epochs N how often to go through the data (default: 10)", "and dither (default: 0)",
                 "onecycle, cosine, linear, constant (default: onecycle)"):  # fmt: skip
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model given; name one with --model"),
        (("--model", "resnet18"), "no data given; name one with --data"),
        (("--model", "resnet81", "--data", "digits"), "unknown zoo model 'resnet81'; .*Did you mean 'resnet18'"),
        (("--model", "resnet18", "--data", "digit"), "unknown data set 'digit'; .*Did you mean 'digits'"),
        (("--model", "resnet18", "--data", "cifar10:none"), "there is no none"),
        (("--model", "gpt", "--data", "digits"), "'gpt' is made for text to predict, data set 'digits' has pictures"),
        (("--model", "net.py:f", "--data", "digits"), "there is no net.py"),
        (("--model", "keras:vgg", "--data", "digits"), "unknown source of models 'keras'; known: PATH.py, hf, timm"),
        ((*_DIGITS, "--model-option", "widht=8"), "unknown option of model 'resnet18' 'widht'; .*Did you mean 'width'"),
        ((*_DIGITS, "--model-option", "width"), "cannot read the option 'width'; write key=value"),
        ((*_DIGITS, "--model-option", "stem=big"), "'resnet18' cannot be built with .*unknown stem 'big'"),
        ((*_DIGITS, "--data-option", "sise=9"), "unknown option of data set 'digits' 'sise'; .*Did you mean 'size'"),
        ((*_DIGITS, "--method", "fixt"), "unknown method 'fixt'; .*Did you mean 'fixed'"),
        (
            (*_DIGITS, "--method", "fixed", "--option", "lienar=1"),
            "unknown option .* 'lienar'; .*Did you mean 'linear'",
        ),
        ((*_DIGITS, "--option", "linear=1"), "plain training has no options, got linear"),
        ((*_DIGITS, "--epochs", "0"), "train.epochs has to be at least 1, got 0"),
        ((*_DIGITS, "--epochs", "many"), "argument --epochs: invalid int value: 'many'"),
        ((*_DIGITS, "--precision", "fp8"), "unknown train.precision 'fp8'; known: bf16, fp16, fp32, tf32"),
        ((*_DIGITS, "--optimizer", "adam"), "unknown optimizer.name 'adam'; .*Did you mean 'adamw'"),
        (
            (*_DIGITS, "--optimizer", "lars"),
            "lars scales the learning rate by layer, .* say --lr",
        ),
        ((*_DIGITS, "--batch", "5000"), "a batch of 5000 does not fit into an epoch of 1437 samples"),
        ((*_DIGITS, "--crop", "8"), "augment.crop moves by 8 pixels, but a picture has 8"),
        ((*_DIGITS, "--device", "gpu"), "cannot read 'gpu' as a device"),
        ((*_DIGITS, "--graph"), "train.graph needs an NVIDIA GPU; this run is on cpu"),
        ((*_DIGITS, "--config", "none.toml"), "cannot read the configuration none.toml: No such file"),
        ((*_DIGITS, "--colour"), "unrecognized arguments: --colour"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(lowtide, capsys, tmp_path, arguments, message):
    device = () if "--device" in arguments else ("--device", "cpu")
    assert lowtide("train", *arguments, *device) == 2
    shown = capsys.readouterr()
    assert re.fullmatch(rf"lowtide.*: .*{message}.*\n", shown.err), shown.err
    assert not shown.out and not list(tmp_path.iterdir())


def test_a_broken_data_file_is_a_failure_and_nothing_is_written(lowtide, capsys, tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"half a download")
    arguments = ("--model", "resnet18", "--data", "cifar10:cifar-10-binary.tar.gz", "--device", "cpu")
    assert lowtide("train", *arguments) == 1
    assert capsys.readouterr().err.startswith("lowtide: DataError: cifar-10-binary.tar.gz is no archive")
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]
    assert lowtide("train", *arguments, "--traceback") == 1
    assert "Traceback" in capsys.readouterr().err


def test_flags_go_before_the_file(train, tmp_path):
    (tmp_path / "my.toml").write_text('[train]\nseed = 5\nlabel_smoothing = 0.1\n[method]\nname = "exact"\n')
    assert train("--config", "my.toml", "--seed", "6", "--epochs", "1", "--out", "run") == 0
    written = (tmp_path / "run" / "config.toml").read_text()
    assert "seed = 6" in written and "label_smoothing = 0.1" in written and 'name = "exact"' in written


def test_the_folder_has_a_name_of_its_own(train, tmp_path):
    assert train("--epochs", "1", "--method", "exact", "--seed", "3") == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["nets.py-net-digits-exact-3"]


def test_settings_of_torch_are_as_they_were(train):
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
    assert train("--epochs", "1", "--deterministic", "--precision", "tf32", "--out", "run") == 0
    after = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
    assert before == after


@pytest.mark.parametrize(
    ("model", "source", "options", "unit"),
    [
        ("gpt", "text:words.txt", ("depth=1", "width=16", "heads=2"), "windows/s"),
        ("lstm", "sst2:.", ("embedding=8", "width=8"), "texts/s"),
    ],
)
def test_text_is_trained_on_too(lowtide, tmp_path: Path, capsys, model, source, options, unit):
    (tmp_path / "words.txt").write_text("the tide is low and the tide is high " * 60)
    for part in ("train", "dev"):
        rows = "".join(f"{'good' if number % 2 else 'bad'} film\t{number % 2}\n" for number in range(40))
        (tmp_path / f"{part}.tsv").write_text(f"sentence\tlabel\n{rows}")
    given = [word for option in options for word in ("--model-option", option)]
    arguments = ("--data-option", "length=8", "--batch", "8", "--epochs", "4", "--method", "fixed", "--device", "cpu")
    assert lowtide("train", "--model", model, "--data", source, *given, *arguments, "--option", "min_size=64",
                   "--log-every", "5", "--lr", "0.02", "--out", "run") == 0  # fmt: skip
    shown = capsys.readouterr()
    assert unit in shown.err
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)  \d+ ", shown.err)]
    assert losses[-1] < 0.7 * losses[0]
