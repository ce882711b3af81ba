"""ResNet-18 and ResNet-50: He et al., "Deep Residual Learning for Image Recognition" (2016).

ResNet-50 is version 1.5: a stage's stride is on the 3 × 3 convolution of its first block, not on the 1 × 1 before it.
Parameter names, in-place ReLU and in-place residual addition are torchvision's, so that the tensors autograd saves, and
the versions it checks, are those that users' models have.
"""

from functools import partial

from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.initialization import initialize_convolutions_
from lowtide.app.zoo.tasks import Stem, check_stem, classification_loss, sample_stem_images


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _make_shortcut(in_channels, channels * self.expansion, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """relu(F(x) + shortcut(x)), with the addition in place."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class Bottleneck(nn.Module):
    """A 1 × 1 convolution to fewer channels, a 3 × 3 one with the stride, a 1 × 1 one back, and a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _make_shortcut(in_channels, channels * self.expansion, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """relu(F(x) + shortcut(x)), with the addition in place."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """Four stages of residual blocks between a stem and a global average pool.

    Args:
        block: the residual block.
        blocks: how many of them in each stage.
        num_classes: number of logits.
        stem: "imagenet" is a 7 × 7 convolution of stride 2 and a max pool; "cifar" a 3 × 3 one of stride 1 and no pool.
        width: channels of the first stage, before the block's expansion; each stage has twice those of the one before.
        zero_init_residual: start each block's last normalisation at zero, so that the block begins as its shortcut
            (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        *,
        num_classes: int = 1000,
        stem: Stem = "imagenet",
        width: int = 64,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        check_stem(stem)
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        outputs = [width * block.expansion * 2**stage for stage in range(4)]
        self.layer1 = _make_stage(block, blocks[0], in_channels=width, channels=width, stride=1)
        self.layer2 = _make_stage(block, blocks[1], in_channels=outputs[0], channels=2 * width, stride=2)
        self.layer3 = _make_stage(block, blocks[2], in_channels=outputs[1], channels=4 * width, stride=2)
        self.layer4 = _make_stage(block, blocks[3], in_channels=outputs[2], channels=8 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs[3], num_classes)
        self._initialize(zero_init_residual=zero_init_residual)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) pictures to (batch, num_classes) logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits

    def _initialize(self, *, zero_init_residual: bool) -> None:
        initialize_convolutions_(self)
        if zero_init_residual:
            for module in self.modules():
                if isinstance(module, Bottleneck):
                    nn.init.zeros_(module.bn3.weight)
                elif isinstance(module, BasicBlock):
                    nn.init.zeros_(module.bn2.weight)


def _make_shortcut(in_channels: int, out_channels: int, *, stride: int) -> nn.Sequential | None:
    """A projection where the block changes the shape, and None where the input itself can be added."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def _make_stage(
    block: type[BasicBlock] | type[Bottleneck], count: int, *, in_channels: int, channels: int, stride: int
) -> nn.Sequential:
    first = block(in_channels, channels, stride=stride)
    rest = (block(channels * block.expansion, channels, stride=1) for _ in range(count - 1))
    return nn.Sequential(first, *rest)


ENTRIES = tuple(
    ZooEntry(
        name=name,
        kind="image",
        builder=partial(ResNet, block, blocks),
        sampler=sample_stem_images,
        loss=classification_loss,
        tiny={"num_classes": 10, "stem": "cifar", "width": 8},
    )
    for name, block, blocks in (
        ("resnet18", BasicBlock, (2, 2, 2, 2)),
        ("resnet50", Bottleneck, (3, 4, 6, 3)),
    )
)
