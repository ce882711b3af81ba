"""VGG-16: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2015).

Configuration D, with torchvision's parameter names and initialisation. The CIFAR form, normalised and with a single
linear layer after the last pool, is the usual one for pictures of 32 pixels.
"""

from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.initialization import initialize_convolutions_
from lowtide.app.zoo.tasks import Stem, check_stem, classification_loss, sample_stem_images

# Per stage: how many convolutions, and their channels as a multiple of the first stage's.
_STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


class VGG16(nn.Module):
    """Thirteen 3 × 3 convolutions in five stages, each closed by a max pool that halves the picture.

    Args:
        num_classes: number of logits.
        stem: "imagenet" pools to 7 × 7 and has three fully connected layers; "cifar" pools to 1 × 1 and has one.
        width: channels of the first stage; the others keep their proportion to it, as do the 64 × width hidden units.
        batch_norm: normalise after each convolution; None means only with the "cifar" stem, since the paper has none.
        dropout: probability after each of the two hidden layers; the "cifar" stem has no hidden layer to drop from.
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        stem: Stem = "imagenet",
        width: int = 64,
        batch_norm: bool | None = None,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check_stem(stem)
        self.features = _make_features(width, batch_norm=stem == "cifar" if batch_norm is None else batch_norm)
        channels, hidden = 8 * width, 64 * width
        if stem == "imagenet":
            self.avgpool = nn.AdaptiveAvgPool2d(7)
            self.classifier = nn.Sequential(
                nn.Linear(channels * 7 * 7, hidden),
                nn.ReLU(inplace=True),
                nn.Dropout(dropout),
                nn.Linear(hidden, hidden),
                nn.ReLU(inplace=True),
                nn.Dropout(dropout),
                nn.Linear(hidden, num_classes),
            )
        else:
            self.avgpool = nn.AdaptiveAvgPool2d(1)
            self.classifier = nn.Sequential(nn.Linear(channels, num_classes))
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) pictures to (batch, num_classes) logits; at least 32 pixels a side."""
        features = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(features.flatten(1))
        return logits

    def _initialize(self) -> None:
        initialize_convolutions_(self)
        for layer in self.classifier:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)


def _make_features(width: int, *, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for convolutions, multiple in _STAGES:
        for _ in range(convolutions):
            layers.append(nn.Conv2d(channels, multiple * width, kernel_size=3, padding=1))
            channels = multiple * width
            if batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU(inplace=True))
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)


ENTRIES = (
    ZooEntry(
        name="vgg16",
        kind="image",
        builder=VGG16,
        sampler=sample_stem_images,
        loss=classification_loss,
        tiny={"num_classes": 10, "stem": "cifar", "width": 8},
    ),
)
