"""Handwritten digits that come with Lowtide: 1797 pictures of 8 x 8 pixels, by 13 writers.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licence CC BY 4.0: the test part, as the file ``digits.xz``, which is 1797 x 64 pixels
from 0 to 16, then 1797 classes, a byte each. Every fifth picture is for testing.
"""

from __future__ import annotations

import lzma
from importlib import resources

import torch

from lowtide.app.data.images import make_images
from lowtide.app.data.splits import DataSet

_COUNT = 1797


def load(*, size: int | None = None) -> DataSet:
    """The digits; ``size`` enlarges them to so many pixels a side."""
    content = resources.files("lowtide.app.data").joinpath("digits.xz").read_bytes()
    values = torch.frombuffer(bytearray(lzma.decompress(content)), dtype=torch.uint8)
    # 0 to 16 becomes 0 to 240, so that a pixel fills its byte as those of other sets do.
    images = values[: _COUNT * 64].view(_COUNT, 1, 8, 8) * 15
    labels = values[_COUNT * 64 :].long()
    tests = torch.arange(_COUNT) % 5 == 0
    return make_images(
        "digits", train=(images[~tests], labels[~tests]), test=(images[tests], labels[tests]), classes=10, size=size
    )
