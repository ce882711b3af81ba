"""What all data sets share: names, limits, splits, normalisation; and the digits that come with Lowtide."""

from __future__ import annotations

import pytest
import torch

from lowtide.app import data
from lowtide.app.data import Table
from lowtide.app.shared.specs import UsageError
from lowtide.errors import UnknownNameError


@pytest.mark.parametrize(
    ("written", "kind", "message"),
    [
        ("cifar1O:x", UnknownNameError, "Did you mean 'cifar10'"),
        ("cifar10", UsageError, "lies in files: write cifar10:PATH"),
        ("digits:here", UsageError, "comes with Lowtide and has no path, got 'here'"),
    ],
)
def test_what_is_written_wrongly_is_refused(written: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        data.parse(written)


def test_a_path_may_have_colons():
    assert data.parse("cifar10:C:/data") == ("cifar10", "C:/data")


def test_the_digits_are_there():
    digits = data.load("digits")
    assert (digits.train.per_epoch, digits.test.per_epoch, digits.shape) == (1437, 360, (1, 8, 8))
    images, labels = digits.train.select(digits.train.keys())
    assert images.dtype == torch.uint8 and images.amax() == 240
    # The published counts of the classes, both parts together (UCI: optdigits.tes).
    every = torch.cat([labels, digits.test.select(digits.test.keys())[1]])
    assert every.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_a_nearest_mean_tells_digits_apart():
    """Pictures and labels belong together: with labels in another order one in ten would be right."""
    digits = data.load("digits")
    images, labels = (part.float() for part in digits.train.select(digits.train.keys()))
    means = torch.stack([images[labels == label].mean(0).flatten() for label in range(10)])
    tests, truth = digits.test.select(digits.test.keys())
    guessed = torch.cdist(tests.float().flatten(1), means).argmin(1)
    assert (guessed == truth).float().mean() > 0.8


def test_limits_take_the_first_samples():
    few = data.load("digits", train=50, test=20)
    assert (few.train.per_epoch, few.test.per_epoch) == (50, 20)
    whole = data.load("digits")
    assert torch.equal(few.train.select(few.train.keys())[0], whole.train.select(whole.train.keys())[0][:50])
    with pytest.raises(UsageError, match="train is a number of samples, 1 or more; got 0"):
        data.load("digits", train=0)


def test_options_go_by_name():
    with pytest.raises(UnknownNameError, match=r"unknown option of data set 'digits' 'sizes'; .*Did you mean 'size'"):
        data.load("digits", sizes=8)
    with pytest.raises(UsageError, match="size is a number of pixels, 1 or more; got -1"):
        data.load("digits", size=-1)


def test_mean_and_deviation_are_those_of_the_pictures():
    images = torch.randint(256, (40, 3, 5, 5), dtype=torch.uint8)
    images[:, 2] = 7
    found = data.DataSet("made", "image", Table(images, torch.zeros(40)), Table(images, torch.zeros(40)), 1)
    mean, deviation = found.scale
    exact = images.double()
    torch.testing.assert_close(torch.tensor(mean), exact.mean((0, 2, 3)), check_dtype=False)
    wanted = exact.std((0, 2, 3), correction=0)
    torch.testing.assert_close(torch.tensor(deviation[:2]), wanted[:2], check_dtype=False)
    assert deviation[2] == 1.0  # a channel without any difference is not divided by nothing


def test_a_shuffle_has_every_sample_once_and_follows_its_seed():
    table = Table(torch.arange(30), torch.arange(30))
    first, again, other = (table.shuffled(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.sort().values, torch.arange(30))
    assert torch.equal(first, again) and not torch.equal(first, other)
