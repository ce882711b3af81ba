"""lowtide plan: its tables, its JSON, models from elsewhere, and what it says when it cannot."""

from __future__ import annotations

import json
import re

import pytest

FEW = ("--device", "cpu", "--probe-device", "cpu", "--batch", "4")


def test_tables_fit_into_80_columns(lowtide, capsys):
    arguments = ("plan", "resnet18", "--tiny", *FEW, "--methods", "exact", "--memory", "2MiB", "--layers", "3")
    assert lowtide(*arguments) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "resnet18, batch 4, tf32, for cpu"
    assert any(line.startswith("plain ") and line.split()[-2] == "no" for line in lines)
    assert any(line.startswith("exact ") for line in lines)
    assert any(line.startswith("bn1:native_batch_norm.input ") for line in lines)
    assert "probing exact on cpu" in shown.err


def test_json_has_the_bytes(lowtide, capsys):
    assert lowtide("plan", "alexnet", "--tiny", *FEW, "--methods", "none", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    (plain,) = record["methods"]
    assert record["is_fake"] and record["probes"] == [] and plain["method"] == "plain"
    saves = sum(save["nbytes"] for save in record["saves"])
    assert plain["held"] >= saves > 0 and plain["needed"] == plain["static"] + plain["peak"]
    assert record["conditions"]["optimizer"] == "sgd"


def test_a_model_of_ones_own(lowtide, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build(num_classes=10, width=8):\n"
        "    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))\n"
        "def small(num_classes, width=8):\n"
        "    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),\n"
        "                         nn.Linear(width, num_classes))\n"
    )
    own = ("--input", "3x16x16", "--classes", "7", "--methods", "none", "--json")
    assert lowtide("plan", "mine.py:small", *FEW, *own, "--set", "width=32") == 0
    record = json.loads(capsys.readouterr().out)
    relu = next(save for save in record["saves"] if save["site"] == "1:relu.result")
    assert relu["numel"] == 4 * 32 * 14 * 14


def test_tokens_for_a_model_of_ones_own(lowtide, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build(vocab_size):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, 16), nn.LayerNorm(16), nn.Linear(16, vocab_size))\n"
    )
    arguments = ("--input", "64", "--classes", "100", "--methods", "none", "--json")
    assert lowtide("plan", "mine.py:build", *FEW, *arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["conditions"]["optimizer"] == "adamw"
    assert any(save["site"] == "1:native_layer_norm.input" and save["numel"] == 4 * 64 * 16 for save in record["saves"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan resnet81", "unknown zoo model 'resnet81'; .*Did you mean 'resnet18'"),
        ("plan resnet18 --methods blod", "unknown method 'blod'; .*Did you mean 'bold'"),
        (
            "plan resnet18 --methods checkpoint",
            "plan knows Lowtide's methods; 'checkpoint' is measured by lowtide bench",
        ),
        ("plan resnet18 --precision bf61", "unknown precision 'bf61'; .*Did you mean 'bf16'"),
        ("plan resnet18 --device tpu", "unknown device 'tpu'"),
        ("plan resnet18 --optimizer adamm", "unknown optimizer 'adamm'; .*Did you mean 'adamw'"),
        ("plan resnet18 --memory 8Q", "cannot read '8Q' as a size"),
        ("plan resnet18 --batch 0", "--batch has to be at least 1, got 0"),
        ("plan resnet18 --input 3x8x8", "the batches of 'resnet18' are known"),
        ("plan mine.py:build", "say what a sample of 'mine.py:build' looks like"),
        ("plan mine.py:build --input 3x8", "cannot read '3x8' as the shape of a sample"),
        ("plan mine.py:build --input 3x8x8", "there is no mine.py"),
        ("plan mine.py:build --tiny --input 3x8x8", "--tiny is for models of the zoo"),
        ("plan resnet18 --set depth=3", "zoo model 'resnet18' has no option 'depth'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(lowtide, capsys, arguments, message):
    assert lowtide(*arguments.split()) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1
    assert re.search(message, shown.err), shown.err
