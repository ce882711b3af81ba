"""Models in training on data with something to learn."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from lowtide.app import zoo
from lowtide.app.shared import workload
from lowtide.app.shared.specs import UsageError
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Data, Task, find_workload
from lowtide.errors import UnknownNameError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["alexnet", "vit_ti_16", "gpt", "llama", "unet", "lstm"])
def test_every_kind_of_model_takes_a_step(name):
    task = Task(find_workload(name, {}, tiny=True), "fp32", batch=2, device=CPU)
    assert task.step().isfinite()
    assert task.items == (32 if name in ("gpt", "llama") else 2)
    assert isinstance(task.optimizer, torch.optim.AdamW) == (name in ("vit_ti_16", "gpt", "llama", "lstm"))


@pytest.mark.parametrize("name", zoo.names())
def test_targets_fit_the_model(name):
    load = find_workload(name, {}, tiny=True)
    inputs, target = Data(load, CPU, 0).batch(3)
    expected = zoo.describe(name).example(3, **zoo.describe(name).tiny)
    assert (inputs.shape, inputs.dtype) == (expected[0].shape, expected[0].dtype)
    assert (target.shape, target.dtype) == (expected[1].shape, expected[1].dtype)
    assert int(target.min()) >= 0 and int(target.max()) < load.classes


def test_batches_are_new_and_repeatable():
    load = find_workload("resnet18", {}, tiny=True)
    data, again = Data(load, CPU, 0), Data(load, CPU, 0)
    first, second = data.batch(2)[0], data.batch(2)[0]
    assert not torch.equal(first, second)
    assert torch.equal(again.batch(2)[0], first) and torch.equal(again.batch(2)[0], second)


def test_there_is_something_to_learn():
    """Images of a class are alike: the nearest mean image of 64 finds the class of 9 in 10 others."""
    data = Data(find_workload("resnet18", {"num_classes": 4}, tiny=True), CPU, 0)
    images, labels = data.batch(256)
    means = torch.stack([images[labels == label].mean(0) for label in range(4)])
    images, labels = data.batch(64)
    found = torch.cdist(images.flatten(1), means.flatten(1)).argmin(1)
    assert float((found == labels).float().mean()) > 0.9


def test_segmentation_has_equal_shares():
    _, target = Data(find_workload("unet", {"num_classes": 4}, tiny=True), CPU, 0).batch(8)
    assert torch.bincount(target.flatten()).min() > target.numel() / 10


def test_the_same_seed_gives_the_same_model_and_losses():
    load = find_workload("resnet18", {}, tiny=True)
    task, again = (Task(load, "fp32", batch=2, device=CPU) for _ in range(2))
    assert [float(task.step()) for _ in range(2)] == [float(again.step()) for _ in range(2)]


@pytest.mark.parametrize(
    ("model", "precision", "asked", "expected"),
    [
        ("resnet18", "bf16", False, True),
        ("resnet18", "tf32", False, False),
        ("resnet18", "fp32", True, True),
        ("vit_ti_16", "bf16", True, False),
        ("gpt", "bf16", True, False),
    ],
)
def test_channels_last_is_for_conv_nets(model, precision, asked, expected):
    task = Task(find_workload(model, {}, tiny=True), precision, batch=2, device=CPU, channels_last=asked)
    assert task.channels_last == expected
    if task.inputs.dim() == 4:
        assert task.inputs.is_contiguous() != expected


def test_bf16_is_autocast():
    load = find_workload("resnet18", {}, tiny=True)
    assert Task(load, "bf16", batch=2, device=CPU).forward().dtype == torch.bfloat16
    assert Task(load, "tf32", batch=2, device=CPU).forward().dtype == torch.float32


def test_a_precision_is_applied_and_taken_back():
    def flags():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = flags()
    for precision, expected in (("fp32", False), ("tf32", True), ("bf16", True)):
        with workload.applied(precision):
            assert flags() == (expected, expected)
        assert flags() == before


def test_options_go_to_the_model_and_to_its_data():
    load = find_workload("resnet18", {"image_size": 16, "num_classes": 5}, tiny=True)
    task = Task(load, "fp32", batch=2, device=CPU)
    assert task.inputs.shape == (2, 3, 16, 16) and task.forward().shape == (2, 5)


@pytest.mark.parametrize(("method", "bound"), [("bold", "0.1"), ("careful", "0.05"), ("fixed", "0.001 probability")])
def test_lowtide_records_the_loss_of_a_task(method, bound):
    """With a bound of the preset's own; without a session there is nothing to record."""
    task = Task(find_workload("gpt", {"vocab_size": 512}, tiny=True), "fp32", batch=2, device=CPU)
    with Variant.parse(method).attached(task, seed=0) as session:
        loss = task.loss()
        (entry,) = [entry for entry in session.report().sites if entry.name == "(model):log_softmax.result"]
        assert (entry.codec, entry.bound, entry.raw_nbytes) == ("sz", bound, 2 * 16 * 512 * 4)
        loss.backward()
        task.step()
    assert task.session is None and task.step().isfinite()


@pytest.fixture
def torchvision(monkeypatch):
    """A torchvision of one model."""
    models = types.ModuleType("torchvision.models")
    models.list_models = lambda module: ["small_net"]
    models.get_model = lambda name, weights, num_classes=1000: nn.Sequential(
        nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, num_classes)
    )
    package = types.ModuleType("torchvision")
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


def test_a_torchvision_model(torchvision):
    load = find_workload("torchvision:small_net", {"image_size": 16, "num_classes": 7})
    task = Task(load, "fp32", batch=2, device=CPU)
    assert task.inputs.shape == (2, 3, 16, 16) and task.step().isfinite()


def test_an_unknown_torchvision_model(torchvision):
    with pytest.raises(UnknownNameError, match=r"torchvision model 'smal_net'.*Did you mean 'small_net'"):
        find_workload("torchvision:smal_net", {})


def test_no_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UsageError, match="torchvision:resnet18 needs torchvision"):
        find_workload("torchvision:resnet18", {})
