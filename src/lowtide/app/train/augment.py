"""Pictures from bytes to what a model takes, on the device and for a whole batch at once.

Moves, mirrors and squares are drawn on the CPU from the seed and the step alone, so they are the same on every device
and in a run that was resumed. A move and a mirror are one gather: pixels beyond the border are those mirrored at it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.app.shared.specs import UsageError
from lowtide.app.train.config import Augment
from lowtide.app.train.seeds import AUGMENT, generator

_RATIOS = (math.log(3 / 4), math.log(4 / 3))  # of width and height of a resized crop, as torchvision has them


class Pictures:
    """Turns batches of byte pictures into normalised floats, augmented for training."""

    def __init__(
        self,
        augment: Augment,
        *,
        scale: tuple[tuple[float, ...], tuple[float, ...]],
        shape: tuple[int, ...],
        channels: int | None,
        device: torch.device,
        channels_last: bool,
        seed: int,
    ) -> None:
        """``channels`` are those the model takes; grey pictures are repeated for a model that takes three."""
        have = shape[0]
        if channels not in (None, have) and have != 1:
            raise UsageError(f"the model takes pictures of {channels} channels, the data have {have}")
        self._repeat = channels if channels is not None and have == 1 else have
        self._augment, self._seed, self._device = augment, seed, device
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        mean, deviation = (torch.tensor(part, device=device).view(1, -1, 1, 1) for part in scale)
        self._mean, self._deviation = mean, deviation
        if augment.crop and augment.crop >= min(shape[1:]):
            raise UsageError(f"augment.crop moves by {augment.crop} pixels, but a picture has {min(shape[1:])}")

    def testing(self, images: Tensor) -> Tensor:
        values = (images.float() - self._mean) / self._deviation
        return values.expand(-1, self._repeat, -1, -1).contiguous(memory_format=self._format)

    def training(self, images: Tensor, step: int) -> Tensor:
        draw = generator(self._seed, AUGMENT, step)
        options = self._augment
        if options.crop or options.flip:
            images = self._move(images, draw)
        values = self.testing(images)
        if options.resized_crop:
            values = self._resize(values, draw)
        return self._cut_out(values, draw) if options.cutout else values

    def _move(self, images: Tensor, draw: torch.Generator) -> Tensor:
        count, _, height, width = images.shape
        reach = self._augment.crop or 0
        shift = torch.randint(-reach, reach + 1, (2, count, 1), generator=draw)
        mirrored = (torch.rand(count, 1, generator=draw) < 0.5) & bool(self._augment.flip)
        rows = _reflect(torch.arange(height) + shift[0], height)
        columns = _reflect(torch.arange(width) + shift[1], width)
        columns = torch.where(mirrored, columns.flip(1), columns)
        rows, columns = self._send(torch.cat([rows, columns], 1).to(torch.int32)).long().split([height, width], 1)
        # One gather of whole pixels: channels last, so that the three values of a pixel lie together.
        flat = images.permute(0, 2, 3, 1).reshape(count, height * width, -1)
        places = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(1)
        moved = flat[torch.arange(count, device=self._device).unsqueeze(1), places]
        return moved.view(count, height, width, -1).permute(0, 3, 1, 2)

    def _resize(self, values: Tensor, draw: torch.Generator) -> Tensor:
        """A part of each picture enlarged to the whole, area and ratio at random (Szegedy et al., 2015)."""
        count = len(values)
        area, ratio, x, y = torch.rand(4, count, generator=draw)
        least = self._augment.resized_crop or 1.0
        side = (least + (1 - least) * area).sqrt()
        stretch = torch.exp((_RATIOS[0] + (_RATIOS[1] - _RATIOS[0]) * ratio) / 2)
        width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
        theta = torch.zeros(count, 2, 3)
        theta[:, 0, 0], theta[:, 1, 1] = width, height
        theta[:, 0, 2], theta[:, 1, 2] = (2 * x - 1) * (1 - width), (2 * y - 1) * (1 - height)
        grid = F.affine_grid(self._send(theta), list(values.shape), align_corners=False)
        resized = F.grid_sample(values, grid, align_corners=False, padding_mode="reflection")
        return resized.contiguous(memory_format=self._format)

    def _cut_out(self, values: Tensor, draw: torch.Generator) -> Tensor:
        """A grey square somewhere in each picture, partly outside too (DeVries and Taylor, 2017)."""
        count, _, height, width = values.shape
        half = (self._augment.cutout or 0) / 2
        centre = torch.rand(2, count, 1, generator=draw)
        inside = [
            (torch.arange(size) + 0.5 - place * size).abs() <= half
            for place, size in zip(centre, (height, width), strict=True)
        ]
        rows, columns = self._send(torch.cat(inside, 1)).split([height, width], 1)
        return values.masked_fill((rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1), 0.0)

    def _send(self, drawn: Tensor) -> Tensor:
        """To the device, without waiting for what it has to do before."""
        return drawn.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else drawn


def _reflect(places: Tensor, size: int) -> Tensor:
    """Places beyond the border, mirrored at it: -1 is 1, and ``size`` is ``size - 2``."""
    last = size - 1
    return last - (last - places.abs()).abs()
