import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.app import zoo
from lowtide.errors import UnknownNameError


def test_names_are_the_models() -> None:
    assert zoo.names() == (
        "alexnet",
        "vgg16",
        "resnet18",
        "resnet50",
        "vit_ti_16",
        "vit_s_16",
        "vit_b_16",
        "gpt",
        "gpt2_small",
        "llama",
        "llama_1b",
        "encoder",
        "unet",
        "lstm",
    )


@pytest.mark.parametrize("lookup", [zoo.build, zoo.describe])
def test_an_unknown_name_lists_the_known_ones(lookup: Callable[[str], object]) -> None:
    with pytest.raises(UnknownNameError, match=r"(?s)resnet19.*resnet18") as caught:
        lookup("resnet19")
    assert isinstance(caught.value, ValueError)


def test_an_unknown_option_names_itself_and_the_known_ones() -> None:
    message = r"'resnet18' has no option 'depth'; it has: num_classes, stem, width, zero_init_residual"
    with pytest.raises(TypeError, match=message):
        zoo.build("resnet18", depth=3)


def test_an_unknown_option_of_example_lists_its_own_too() -> None:
    message = r"'resnet18' has no option 'size'; it has: image_size, num_classes, stem"
    with pytest.raises(TypeError, match=message):
        zoo.describe("resnet18").example(2, size=16)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet18", "resnet50"])
def test_an_unknown_stem_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"(?s)stem.*mnist.*cifar"):
        zoo.build(name, stem="mnist")
    with pytest.raises(UnknownNameError, match=r"(?s)stem.*mnist.*cifar"):
        zoo.describe(name).example(2, stem="mnist")


def test_options_carry_the_defaults_of_the_preset() -> None:
    assert zoo.describe("vit_s_16").options["width"] == 384
    assert zoo.describe("gpt2_small").options["vocab_size"] == 50257
    assert zoo.describe("resnet50").options == {
        "num_classes": 1000,
        "stem": "imagenet",
        "width": 64,
        "zero_init_residual": False,
    }


def test_entries_cannot_be_changed() -> None:
    entry = zoo.describe("lstm")
    with pytest.raises(dataclasses.FrozenInstanceError, match="name"):
        entry.name = "gru"
    with pytest.raises(TypeError, match="item assignment"):
        entry.tiny["depth"] = 1
    assert len({entry, zoo.describe("gpt")}) == 2


def test_entries_copy_the_tiny_options_they_are_given() -> None:
    tiny: dict[str, object] = {"width": 2}
    entry = zoo.ZooEntry("m", kind="image", builder=nn.Linear, sampler=torch.randn, loss=torch.sub, tiny=tiny)
    tiny["width"] = 3
    assert entry.tiny == {"width": 2}
