"""AlexNet: Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep CNNs" (2012).

The one-tower form of Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), without
local response normalisation: the one torchvision has, with its parameter names and torch's default initialisation.
"""

from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.tasks import Stem, check_stem, classification_loss, sample_stem_images


class AlexNet(nn.Module):
    """Five convolutions, an adaptive average pool and three fully connected layers.

    Args:
        num_classes: number of logits.
        stem: "imagenet" begins with an 11 × 11 convolution of stride 4 and pools to 6 × 6; "cifar" begins with a 5 × 5
            convolution of stride 1 and pools to 3 × 3, which is what 32 pixels leave after three max pools.
        width: channels of the first convolution; the others keep their proportion to it (64, 192, 384, 256, 256, and
            4096 hidden units).
        dropout: probability before each of the two hidden layers.
    """

    def __init__(
        self, *, num_classes: int = 1000, stem: Stem = "imagenet", width: int = 64, dropout: float = 0.5
    ) -> None:
        super().__init__()
        check_stem(stem)
        if stem == "imagenet":
            first, cells = nn.Conv2d(3, width, kernel_size=11, stride=4, padding=2), 6
        else:
            first, cells = nn.Conv2d(3, width, kernel_size=5, padding=2), 3
        hidden = 64 * width
        self.features = nn.Sequential(
            first,
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(width, 3 * width, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(3 * width, 6 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(cells)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(4 * width * cells * cells, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) pictures to (batch, num_classes) logits."""
        features = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(features.flatten(1))
        return logits


ENTRIES = (
    ZooEntry(
        name="alexnet",
        kind="image",
        builder=AlexNet,
        sampler=sample_stem_images,
        loss=classification_loss,
        tiny={"num_classes": 10, "stem": "cifar", "width": 8},
    ),
)
