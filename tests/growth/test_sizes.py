"""Sizes as people write them, and learning rates for other batch sizes."""

from __future__ import annotations

import pytest

from lowtide import scale_lr, sizes
from lowtide.errors import SizeError, UnknownNameError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (12345, 12345),
        ("12345", 12345),
        ("64K", 65536),
        ("64 KiB", 65536),
        ("1.5MiB", 3 << 19),
        ("16GiB", 16 << 30),
        ("16 gb", 16 << 30),
        ("2T", 2 << 40),
    ],
)
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert sizes.parse(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "0.2", "1.5.2G", "16 GiBs", 0, -5, True, 1.5, None])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(SizeError, match=r"^staging is a number of bytes or a text such as '512MiB' or '16GiB'; got"):
        sizes.parse(text, what="staging")  # type: ignore[arg-type]


def test_rules_for_the_learning_rate() -> None:
    assert scale_lr(0.1, 256, 1024) == 0.1
    assert scale_lr(0.1, 256, 1024, "linear") == pytest.approx(0.4)
    assert scale_lr(0.1, 256, 1024, "sqrt") == pytest.approx(0.2)
    assert scale_lr(0.4, 1024, 256, "linear") == pytest.approx(0.1)


def test_mistakes_about_the_learning_rate_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown rule for the learning rate 'squrt'.*Did you mean 'sqrt'"):
        scale_lr(0.1, 1, 2, "squrt")
    with pytest.raises(SizeError, match="batch sizes are at least 1; got old=256, new=0"):
        scale_lr(0.1, 256, 0, "linear")
