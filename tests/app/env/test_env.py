"""lowtide env: what is there, and a test that notices what does not work."""

from __future__ import annotations

import json

import pytest
import torch

from lowtide import __version__, codecs
from lowtide.app import env, selftest
from lowtide.codecs.sz import Sz
from lowtide.registry import CODECS, METHODS


def test_versions_kernels_and_tests(lowtide, capsys):
    assert lowtide("env") == 0
    shown = capsys.readouterr().out
    assert f"lowtide   {__version__}" in shown and f"torch     {torch.__version__}" in shown
    assert all(name in shown for name in CODECS.names()) and all(name in shown for name in METHODS.names())
    assert "FAILED" not in shown and "step, exact" in shown


def test_json_has_the_same(lowtide, capsys):
    assert lowtide("env", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["kernels"]["cpu"]) == set(CODECS.names())
    names = {item["name"].split(",")[0] for item in record["tests"]}
    assert names == {*CODECS.names(), "step"} and not any(item["fault"] for item in record["tests"])


def test_without_the_test(lowtide, capsys, monkeypatch):
    monkeypatch.setattr(selftest, "run", lambda devices: pytest.fail("the test was to be skipped"))
    assert lowtide("env", "--no-test") == 0
    assert "tests passed" not in capsys.readouterr().out


def test_a_codec_that_breaks_its_promise_fails(lowtide, capsys, monkeypatch):
    decode = Sz.decode
    monkeypatch.setattr(Sz, "decode", lambda self, encoded: decode(self, encoded) + 0.2)
    assert lowtide("env") == 1
    shown = capsys.readouterr().out
    assert "cpu: sz, float32: gate bound:" in shown and "FAILED" in shown


def test_a_codec_that_raises_fails_alone(monkeypatch):
    def explode(self, encoded):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(type(codecs.create("bitmask")), "decode", explode)
    verdicts = {item.name: item.fault for item in selftest.run([torch.device("cpu")])}
    assert verdicts["bitmask, bool"] == "RuntimeError: no such kernel"
    assert verdicts["sz, float32"] == "" and verdicts["window_index, int64"] == ""
    assert "no such kernel" in verdicts["step, exact"]


def test_the_test_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(selftest.run([torch.device("cpu")]))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_live_and_pass():
    live = env.describe()["kernels"]["cuda:0"]
    assert live["sz"] in ("CUDA C++", "Triton") and live["bitmask"] == "Triton"
    assert not [item for item in selftest.run([torch.device("cuda", 0)]) if item.fault]
