from collections.abc import Callable

import torch
from torch import nn

from lowtide.app import zoo
from lowtide.app.zoo.alexnet import AlexNet


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    assert count_parameters("alexnet") == 61_100_840


def test_parameters_are_named_as_in_torchvision() -> None:
    with torch.device("meta"):
        weights = [name for name in zoo.build("alexnet").state_dict() if name.endswith("weight")]
    assert weights == [
        *(f"features.{index}.weight" for index in (0, 3, 6, 8, 10)),
        *(f"classifier.{index}.weight" for index in (1, 4, 6)),
    ]


def test_the_pool_has_the_cells_of_the_features() -> None:
    with torch.device("meta"):
        imagenet, cifar = AlexNet(), AlexNet(stem="cifar")
        assert imagenet.features(torch.empty(1, 3, 224, 224)).shape == (1, 256, 6, 6)
        assert cifar.features(torch.empty(1, 3, 32, 32)).shape == (1, 256, 3, 3)
    assert (imagenet.avgpool.output_size, cifar.avgpool.output_size) == (6, 3)


def test_dropout_reaches_both_hidden_layers() -> None:
    model = AlexNet(stem="cifar", width=2, dropout=0.25)
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.25, 0.25]
