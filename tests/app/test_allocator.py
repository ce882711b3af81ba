"""Expandable segments: on in our own processes, off where the user says so or where they do not work."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys

import pytest
import torch
from torch import nn

from lowtide import attach
from lowtide.app.shared import allocator
from lowtide.app.shared.script import run_script

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ON = "expandable_segments:True"


@pytest.fixture(autouse=True)
def _on_linux_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where segments can grow, and no setting; what a test sets is gone afterwards."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-45-generic")
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that its absence is what comes back in the end
        monkeypatch.delenv(name)


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_a_command_turns_them_on_and_env_says_so(lowtide, capsys):
    assert lowtide("env", "--no-test") == 0
    assert settings() == {"PYTORCH_ALLOC_CONF": ON}
    assert f"allocator PYTORCH_ALLOC_CONF={ON} (our commands set it unless you have" in capsys.readouterr().out
    assert lowtide("env", "--no-test", "--json") == 0
    assert json.loads(capsys.readouterr().out)["allocator"] == f"PYTORCH_ALLOC_CONF={ON}"


def test_a_script_turns_them_on_before_it_does_anything(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py"])
    seen = []

    def run(options: argparse.Namespace) -> list[dict[str, object]]:
        seen.append(settings())
        return []

    assert run_script("", lambda parser: None, run) == 0
    assert seen == [{"PYTORCH_ALLOC_CONF": ON}]


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("text", ["max_split_size_mb:64", "expandable_segments:False", ""])
def test_what_the_user_has_set_stays_alone(lowtide, capsys, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    assert lowtide("env", "--no-test") == 0
    assert settings() == {name: text}
    assert f"allocator {name}={text}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.version, "cuda", None),
        (sys, "platform", "win32"),
        (sys, "platform", "darwin"),
        (platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2"),
        (platform, "release", lambda: "5.15.148-tegra"),
        (torch.cuda, "is_initialized", lambda: True),
    ],
    ids=["no CUDA", "Windows", "macOS", "WSL", "Tegra", "too late"],
)
def test_where_they_do_not_work_nothing_is_set(monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    allocator.use_expandable_segments()
    assert settings() == {} and allocator.describe_setting() == ""


def test_the_library_changes_nothing():
    model = nn.Linear(8, 8)
    tide = attach(model, "exact")
    model(torch.ones(2, 8)).sum().backward()
    tide.detach()
    assert settings() == {}


@pytest.mark.parametrize(
    ("given", "is_off"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": ON}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, False),
        ({"PYTORCH_ALLOC_CONF": ""}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "PYTORCH_ALLOC_CONF": ON}, True),
    ],
)
def test_off_by_choice(monkeypatch, given, is_off):
    """Where both are set torch 2.11 and 2.13 go by the older name."""
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    assert allocator.is_off_by_choice() == is_off
    monkeypatch.setattr(sys, "platform", "win32")
    assert not allocator.is_off_by_choice(), "there it would not help"
