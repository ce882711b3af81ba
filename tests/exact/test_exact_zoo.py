"""Every model of the zoo trains bit-equally under method "exact": fp32 and bf16, both layouts, two optimizers."""

from __future__ import annotations

import pytest
from train import Problem, assert_bit_equal, assert_exact, plainly, train

from lowtide.app import zoo

BATCH = 4  # of 3, oneDNN (torch 2.13, AVX-512) crashes in the backward of a strided 1x1 convolution, channels_last
IMAGES = [name for name in zoo.names() if zoo.describe(name).kind in ("image", "segmentation")]
DROPOUT = [name for name in zoo.names() if "dropout" in zoo.describe(name).options]
# What the exact method finds to compress at the tiny sizes: nothing in a transformer without dropout.
CODED = {
    **{name: {"bitmask", "window_index", "shape"} for name in ("alexnet", "vgg16", "unet")},
    **{name: {"bitmask"} for name in ("resnet18", "resnet50", "gpt2_small", "lstm")},
}
precisions = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


def make_problem(name: str, *, bf16: bool = False, channels_last: bool = False, **options: object) -> Problem:
    """The model at its tiny size, but for ``options``, on its synthetic batches."""
    entry = zoo.describe(name)
    settings = {**entry.tiny, **options}
    building = {option: value for option, value in settings.items() if option in entry.options}
    return Problem(
        lambda: entry.build(**building),
        lambda generator: entry.example(BATCH, generator=generator, **settings),
        lambda model, inputs, target: entry.loss(model(inputs), target),
        bf16,
        channels_last,
    )


def test_plain_training_repeats_itself() -> None:
    """What every comparison here rests on."""
    for name in zoo.names():
        assert_bit_equal(*(train(make_problem(name), plainly)[0] for _ in range(2)))


@pytest.mark.parametrize(("optimizer", "bf16"), [("sgd", False), ("sgd", True), ("adamw", True)])
@pytest.mark.parametrize("name", zoo.names())
def test_zoo_models_train_bit_equally(name: str, optimizer: str, bf16: bool) -> None:
    assert_exact(make_problem(name, bf16=bf16), optimizer=optimizer, coded=CODED.get(name, set()))


@precisions
@pytest.mark.parametrize("name", IMAGES)
def test_zoo_models_train_bit_equally_in_channels_last(name: str, bf16: bool) -> None:
    assert_exact(make_problem(name, bf16=bf16, channels_last=True), coded=CODED.get(name, set()))


@precisions
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_draws_the_same_masks(name: str, bf16: bool) -> None:
    """The state of the global RNG is part of what is compared."""
    assert_exact(make_problem(name, bf16=bf16, dropout=0.2), coded={"bitmask"})


@precisions
@pytest.mark.parametrize("name", ["alexnet", "resnet18", "resnet50"])
def test_strided_stems(name: str, bf16: bool) -> None:
    """Stems for large pictures: overlapping max pools with padding."""
    strided = make_problem(name, bf16=bf16, stem="imagenet", image_size=64)
    assert_exact(strided, steps=2, coded={"bitmask", "window_index", "shape"})
