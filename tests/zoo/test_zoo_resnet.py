import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.app import zoo
from lowtide.app.zoo.resnet import BasicBlock, Bottleneck


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    assert count_parameters("resnet18") == 11_689_512
    assert count_parameters("resnet50") == 25_557_032


def test_num_classes_changes_the_last_layer_alone(count_parameters: Callable[..., int]) -> None:
    assert count_parameters("resnet50", num_classes=10) == 25_557_032 - 990 * 2049


def test_parameters_are_named_as_in_torchvision() -> None:
    with torch.device("meta"):
        state = zoo.build("resnet50").state_dict()
    assert {name.split(".")[0] for name in state} == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}
    assert {name.split(".", 2)[2] for name in state if name.startswith("layer1.0.")} >= {
        "conv1.weight",
        "bn3.running_var",
        "downsample.0.weight",
        "downsample.1.num_batches_tracked",
    }
    assert not any(name.startswith("layer1.1.downsample") for name in state)


def test_stride_is_on_the_3x3_convolution() -> None:
    block = Bottleneck(16, 8, stride=2)
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]
    assert block.conv2.kernel_size == (3, 3)


@pytest.mark.parametrize(("stem", "image_size", "cells"), [("imagenet", 224, 56), ("cifar", 32, 32)])
def test_the_stem_leaves_the_papers_resolution(stem: str, image_size: int, cells: int) -> None:
    with torch.device("meta"):
        model = zoo.build("resnet18", stem=stem)
        shapes = []
        for stage in (model.layer1, model.layer4):
            stage.register_forward_hook(lambda _module, _inputs, output: shapes.append(output.shape))
        model(torch.empty(1, 3, image_size, image_size))
    assert shapes == [(1, 64, cells, cells), (1, 512, cells // 8, cells // 8)]


@pytest.mark.parametrize(("block", "last"), [(BasicBlock, "bn2"), (Bottleneck, "bn3")])
def test_residual_and_relu_are_in_place(block: type[BasicBlock | Bottleneck], last: str) -> None:
    module = block(4, 4, stride=1)
    kept = []
    getattr(module, last).register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    out = module(torch.randn(2, 4, 8, 8))
    # The addition and the ReLU each count as one version of the tensor that the normalisation returned.
    assert kept[0]._version == 2
    assert kept[0].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_convolutions_start_with_fan_out(name: str, assert_std: Callable[[torch.Tensor, float], None]) -> None:
    convolutions = [layer for layer in zoo.build(name, width=16).modules() if isinstance(layer, nn.Conv2d)]
    for layer in convolutions:
        fan_out = layer.out_channels * layer.kernel_size[0] * layer.kernel_size[1]
        assert_std(layer.weight, math.sqrt(2 / fan_out))
    assert len(convolutions) == {"resnet18": 20, "resnet50": 53}[name]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_zero_init_makes_each_block_its_shortcut(name: str) -> None:
    plain = zoo.build(name, width=4, stem="cifar").layer1[1]
    zeroed = zoo.build(name, width=4, stem="cifar", zero_init_residual=True).layer1[1]
    x = torch.rand(2, plain.conv1.in_channels, 8, 8)
    assert torch.equal(zeroed(x), x)
    assert not torch.equal(plain(x), x)
