import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.app import zoo
from lowtide.app.zoo.vgg import VGG16


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    assert count_parameters("vgg16") == 138_357_544
    # Two parameters per channel of the thirteen normalisations: 2 × 4224.
    assert count_parameters("vgg16", batch_norm=True) == 138_357_544 + 8448


@pytest.mark.parametrize(
    ("stem", "batch_norm", "expected"),
    [("imagenet", None, 0), ("imagenet", True, 13), ("cifar", None, 13), ("cifar", False, 0)],
)
def test_normalisation_is_the_default_of_the_cifar_stem_alone(
    stem: str, batch_norm: bool | None, expected: int
) -> None:
    model = zoo.build("vgg16", stem=stem, batch_norm=batch_norm, width=2)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == expected


def test_parameters_are_named_as_in_torchvision() -> None:
    with torch.device("meta"):
        weights = [name for name in zoo.build("vgg16").state_dict() if name.endswith("weight")]
    assert weights == [
        *(f"features.{index}.weight" for index in (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)),
        *(f"classifier.{index}.weight" for index in (0, 3, 6)),
    ]


def test_the_pool_has_the_cells_of_the_features() -> None:
    with torch.device("meta"):
        assert VGG16().features(torch.empty(1, 3, 224, 224)).shape == (1, 512, 7, 7)
        assert VGG16(stem="cifar").features(torch.empty(1, 3, 32, 32)).shape == (1, 512, 1, 1)


def test_weights_start_with_fan_out_and_a_hundredth(assert_std: Callable[[torch.Tensor, float], None]) -> None:
    model = VGG16(width=8)
    convolution = model.features[5]
    assert_std(convolution.weight, math.sqrt(2 / (16 * 9)))
    assert_std(model.classifier[0].weight, 0.01)
    assert not convolution.bias.any() and not model.classifier[0].bias.any()
