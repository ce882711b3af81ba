"""U-Net: Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015).

Convolutions are padded and normalised, as is usual now, so that the output has the size of the input; the paper's are
neither. Weights start as the paper has them, with a std of sqrt(2 / N) for N incoming values.
"""

import math

import torch
from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.tasks import classification_loss, sample_segmentation


class UNet(nn.Module):
    """An encoder that halves the picture `depth` times, and a decoder that doubles it back beside the encoder's output.

    Args:
        num_classes: number of logits per pixel.
        in_channels: channels of the picture.
        depth: number of max pools; height and width must be divisible by 2**depth.
        width: channels at full size, doubled at each level below.
    """

    def __init__(self, *, num_classes: int = 2, in_channels: int = 3, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.depth = depth
        channels = [in_channels, *(width * 2**level for level in range(depth + 1))]
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.encoder = nn.ModuleList(_make_level(channels[level], channels[level + 1]) for level in range(depth))
        self.bottom = _make_level(channels[depth], channels[depth + 1])
        rising = channels[depth:0:-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * level, level, kernel_size=2, stride=2) for level in rising)
        self.decoder = nn.ModuleList(_make_level(2 * level, level) for level in rising)
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, height, width) pictures to (batch, num_classes, height, width) logits."""
        if any(size % 2**self.depth for size in images.shape[-2:]):
            raise ValueError(
                f"U-Net of depth {self.depth} needs a height and width divisible by {2**self.depth}, "
                f"got {tuple(images.shape)}; pad or crop the pictures"
            )
        x, skips = images, []
        for level in self.encoder:
            x = level(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, level in zip(self.up, self.decoder, strict=True):
            x = level(torch.cat([skips.pop(), up(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits

    def _initialize(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                incoming = layer.weight[0].numel()
            elif isinstance(layer, nn.ConvTranspose2d):
                # Its stride is its kernel size, so each output sees one tap of each input channel.
                incoming = layer.in_channels
            else:
                continue
            nn.init.normal_(layer.weight, std=math.sqrt(2 / incoming))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _make_level(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


ENTRIES = (
    ZooEntry(
        name="unet",
        kind="segmentation",
        builder=UNet,
        sampler=sample_segmentation,
        loss=classification_loss,
        tiny={"num_classes": 3, "depth": 2, "width": 8},
    ),
)
