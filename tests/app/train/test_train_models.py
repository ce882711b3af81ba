"""Models by name: what they are told about the data, and what is said where there is none of the name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from lowtide.app import data
from lowtide.app.data import DataSet, Stream, Table
from lowtide.app.models import count_channels, find_model
from lowtide.app.shared.specs import UsageError
from lowtide.errors import UnknownNameError


def _images(size: int, channels: int = 3) -> DataSet:
    table = Table(torch.zeros(4, channels, size, size, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    return DataSet("made", "image", table, table, 7)


def _tokens() -> DataSet:
    stream = Stream(torch.zeros(100, dtype=torch.uint8), 12)
    return DataSet("made", "tokens", stream, stream, 50, vocabulary=50, length=12)


def _sentences() -> DataSet:
    table = Table(torch.zeros(4, 12, dtype=torch.int32), torch.zeros(4, dtype=torch.int64))
    return DataSet("made", "text", table, table, 3, vocabulary=50, length=12)


@pytest.mark.parametrize(
    ("name", "source", "options", "shape"),
    [
        ("resnet18", _images(32), {"width": 8}, (2, 7)),
        ("resnet50", _images(224), {"width": 8}, (2, 7)),
        ("vgg16", _images(32), {"width": 8}, (2, 7)),
        ("alexnet", _images(32), {"width": 8}, (2, 7)),
        ("vit_ti_16", _images(32), {"depth": 1, "width": 48}, (2, 7)),
        ("gpt", _tokens(), {"depth": 1, "width": 12, "heads": 2}, (2, 12, 50)),
        ("lstm", _sentences(), {"width": 8}, (2, 3)),
    ],
)
def test_a_model_of_the_zoo_is_fitted_to_the_data(name, source, options, shape):
    found = find_model(name, options, source)
    inputs, _ = source.train.select(source.train.keys()[:2])
    given = inputs.float() if source.kind == "image" else inputs
    assert found.build()(given).shape == shape
    assert options.items() <= found.options.items()


def test_small_pictures_get_a_stem_for_small_pictures_and_the_user_may_have_another():
    assert find_model("resnet18", {}, _images(32)).options == {"num_classes": 7, "stem": "cifar"}
    assert find_model("resnet18", {}, _images(128)).options == {"num_classes": 7}
    assert find_model("resnet18", {"stem": "imagenet"}, _images(32)).options["stem"] == "imagenet"
    assert find_model("vit_ti_16", {}, _images(32)).options == {"num_classes": 7, "image_size": 32, "patch_size": 4}


def test_channels_are_those_of_the_first_convolution():
    assert count_channels(find_model("resnet18", {"width": 8}, _images(32)).build()) == 3
    assert count_channels(nn.Linear(2, 2)) is None


def test_a_function_in_a_file(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n"
        "def small(num_classes, image_size, depth=1):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))\n"
        "def wrong(): return 3\n"
        "def broken(): return nn.Linear(-1, 'x')\n"
    )
    found = find_model(f"{path}:small", {"depth": 2}, _images(8))
    assert found.options == {"num_classes": 7, "image_size": 8, "depth": 2}
    assert found.build()(torch.zeros(2, 3, 8, 8)).shape == (2, 7)
    with pytest.raises(UnknownNameError, match=r"unknown function of .*mine.py 'smal'; .*Did you mean 'small'"):
        find_model(f"{path}:smal", {}, _images(8))
    with pytest.raises(UnknownNameError, match=r"unknown option of .*mine.py:small 'dept'; .*Did you mean 'depth'"):
        find_model(f"{path}:small", {"dept": 2}, _images(8))
    with pytest.raises(UsageError, match=r"its function returned int, not an nn.Module"):
        find_model(f"{path}:wrong", {}, _images(8)).build()
    with pytest.raises(UsageError, match="cannot be built with"):
        find_model(f"{path}:broken", {}, _images(8)).build()
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(UsageError, match=r"mine.py cannot be imported: ModuleNotFoundError"):
        find_model(f"{path}:small", {}, _images(8))


@pytest.mark.parametrize(
    ("source", "package"), [("torchvision", "torchvision"), ("timm", "timm"), ("hf", "transformers")]
)
def test_a_library_that_is_not_there_is_named(monkeypatch, source, package):
    for module in (package, f"{package}.models"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"{package} cannot be imported .*pip install {package}"):
        find_model(f"{source}:resnet18", {}, _images(32))


def test_torchvision_is_asked_for_its_model(monkeypatch):
    """A stand-in with torchvision's two functions; the test below asks the real one where it is installed."""
    models = ModuleType("torchvision.models")
    models.list_models = lambda: ["resnet18", "resnet34", "vgg16"]
    models.get_model = lambda name, weights, num_classes: nn.Linear(len(name), num_classes)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert find_model("torchvision:resnet34", {}, _images(32)).build().out_features == 7
    with pytest.raises(UnknownNameError, match=r"unknown torchvision model 'resnet43'; .*Did you mean 'resnet34'"):
        find_model("torchvision:resnet43", {}, _images(32))
    with pytest.raises(UsageError, match="torchvision's models take pictures, data set 'made' has text to predict"):
        find_model("torchvision:resnet34", {}, _tokens())


@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize(
    ("name", "source", "options", "shape"),
    [
        ("torchvision:resnet18", _images(64), {}, (2, 7)),
        ("timm:resnet18", _images(32, channels=1), {}, (2, 7)),
        ("hf:gpt2", _tokens(), {"n_layer": 1, "n_embd": 16, "n_head": 2}, (2, 12, 50)),
        ("hf:bert", _sentences(), {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}, (2, 3)),
        ("hf:vit", _images(32), {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}, (2, 7)),
    ],
)
def test_models_of_libraries_that_are_installed(name, source, options, shape):
    pytest.importorskip({"hf": "transformers"}.get(name.partition(":")[0], name.partition(":")[0]))
    model = find_model(name, options, source).build().train()
    inputs, _ = source.train.select(source.train.keys()[:2])
    assert model(inputs.float() if source.kind == "image" else inputs).shape == shape


def test_digits_are_trained_with_three_channels_by_a_model_that_takes_three(lowtide, tmp_path):
    assert data.load("digits").shape[0] == 1
    few = ("--data-option", "train=64", "--data-option", "test=32", "--batch", "32", "--epochs", "1", "--device", "cpu")
    assert lowtide("train", "--model", "resnet18", "--model-option", "width=4", "--data", "digits", *few) == 0
