"""The command line: help, names that are wrong, exit statuses, one line for what went wrong."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from lowtide import __version__
from lowtide.app.bench import codec
from lowtide.errors import LowtideError


def test_the_version(lowtide, capsys):
    assert lowtide("--version") == 0
    assert capsys.readouterr().out == f"lowtide {__version__}\n"


def test_the_package_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lowtide", "--version"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("lowtide", run_name="__main__")
    assert exit.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), "lowtide plan resnet50"),
        (("bench",), "Measure codecs and training steps."),
        (("bench", "codec"), "--real MODEL"),
        (("bench", "step"), "--sync-check"),
    ],
)
def test_help_has_texts_and_examples(lowtide, capsys, arguments, wanted):
    assert lowtide(*arguments, "--help") == 0
    shown = capsys.readouterr().out
    assert wanted in shown
    assert len(arguments) == 1 or "examples:" in shown
    assert "default: None" not in shown


@pytest.mark.parametrize("arguments", [(), ("bench",)])
def test_nothing_to_do_shows_the_help(lowtide, capsys, arguments):
    assert lowtide(*arguments) == 2
    assert "usage: lowtide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("benhc", "invalid choice: 'benhc' .*bench"),
        ("bench codek", "invalid choice: 'codek' .*codec"),
        ("bench codec --byts 3", "unrecognized arguments: --byts 3"),
        ("bench codec --codecs zs", "unknown codec 'zs'; known: .*sz"),
        ("bench codec --codecs sz:blokcs", "unknown coder 'blokcs'; .*Did you mean 'blocks'"),
        ("bench codec --codecs sz(codr=blocks)", "unknown option of codec 'sz' 'codr'; .*Did you mean 'coder'"),
        ("bench codec --codecs sz(coder", r"cannot read 'sz\(coder'; write NAME"),
        ("bench codec --codecs shape", "codec 'shape' does not carry values"),
        ("bench codec --codecs cast:bf16 --dtypes bfloat16", "none of these codecs takes any of these dtypes"),
        ("bench codec --codecs ,", "--codecs and --bounds each need at least one"),
        ("bench codec --bounds 1.0std", "cannot read '1.0std' as a bound"),
        ("bench codec --bounds -1", "bound must be finite and greater than zero"),
        ("bench codec --sources rleu", "unknown source 'rleu'; .*Did you mean 'relu'"),
        ("bench codec --dtypes float31", "unknown dtype 'float31'; .*Did you mean 'float32'"),
        ("bench codec --bytes 2Q", "cannot read '2Q' as a size"),
        ("bench codec --repeats 0", "--repeats has to be at least 1, got 0"),
        ("bench codec --device gpu", "cannot read 'gpu' as a device"),
        ("bench codec --device meta", "run on cuda or cpu, not on 'meta'"),
        ("bench codec --real resnet81", "unknown zoo model 'resnet81'; .*Did you mean 'resnet18'"),
        ("bench codec --real resnet18 --tiny --dtypes float16", "float32 or bfloat16, not as float16"),
        ("bench codec --real vit_ti_16 --tiny --batch 2", "has no convolution behind a ReLU"),
        ("bench step resnet51", "unknown zoo model 'resnet51'; .*Did you mean 'resnet50'"),
        ("bench step resnet18 --set depth=3", "--set: zoo model 'resnet18' has no option 'depth'"),
        ("bench step resnet18 --set depth", "cannot read the option 'depth'; write key=value"),
        ("bench step resnet18 --precision bf61", "unknown precision 'bf61'; .*Did you mean 'bf16'"),
        ("bench step resnet18 --precision ,", "no precision given"),
        ("bench step resnet18 --methods blod", "unknown method 'blod'; known: .*Did you mean 'bold'"),
        ("bench step resnet18 --methods bold(linar=1)", "unknown option .* 'linar'; .*Did you mean 'linear'"),
        ("bench step resnet18 --methods bold(linear=-1)", "bound must be finite and greater than zero"),
        ("bench step resnet18 --methods exact:blocks", "unknown option of method 'exact' 'coder'"),
        ("bench step resnet18 --methods bold(seed=3)", "seed is set by the command itself"),
        ("bench step resnet18 --methods compile:fast", "'compile' has no options"),
        ("bench step torchvision:resnet18 --tiny", "--tiny is for models of the zoo"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_runs(lowtide, capsys, tmp_path, arguments, message):
    device = () if "--device" in arguments or "bench " not in arguments else ("--device", "cpu")
    codecs = ("--codecs", "sz:blocks") if "bench codec" in arguments and "--codecs" not in arguments else ()
    assert lowtide(*arguments.split(), *codecs, *device) == 2
    shown = capsys.readouterr()
    assert re.fullmatch(rf"lowtide.*: .*{message}.*\n", shown.err), shown.err
    assert not shown.out and not list(tmp_path.iterdir())


def test_a_cuda_device_that_is_not_there_is_refused(lowtide, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert lowtide("bench", "codec", "--device", "cuda") == 2
    assert "there is no CUDA device here; use --device cpu" in capsys.readouterr().err


def _fail(options):
    raise LowtideError("the tide\nis out")


def test_a_failure_is_one_line(lowtide, capsys, monkeypatch):
    monkeypatch.setattr(codec, "run", _fail)
    assert lowtide("bench", "codec") == 1
    assert capsys.readouterr().err == "lowtide: LowtideError: the tide is out\n"


def test_a_failure_with_its_traceback(lowtide, capsys, monkeypatch):
    monkeypatch.setattr(codec, "run", _fail)
    assert lowtide("bench", "codec", "--traceback") == 1
    assert "Traceback" in capsys.readouterr().err
