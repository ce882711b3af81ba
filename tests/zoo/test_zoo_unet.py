import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.app import zoo
from lowtide.app.zoo.unet import UNet


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    def count_level(before: int, after: int) -> int:
        return 9 * before * after + 9 * after * after + 4 * after

    down = sum(
        count_level(before, after) for before, after in [(3, 64), (64, 128), (128, 256), (256, 512), (512, 1024)]
    )
    up = sum(count_level(2 * level, level) + 4 * 2 * level * level + level for level in (512, 256, 128, 64))
    assert count_parameters("unet") == down + up + (64 * 2 + 2) == 31_037_698


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_takes_any_size_divisible_by_its_pools(depth: int) -> None:
    model = UNet(num_classes=5, in_channels=2, depth=depth, width=4)
    height, width = 3 * 2**depth, 2**depth
    assert model(torch.randn(2, 2, height, width)).shape == (2, 5, height, width)


def test_it_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match=r"depth 2 needs .* divisible by 4, got \(1, 3, 32, 30\); pad or crop"):
        UNet(depth=2, width=4)(torch.zeros(1, 3, 32, 30))


def test_the_skip_carries_what_the_bottom_cannot() -> None:
    model = UNet(depth=1, width=4).eval()
    nn.init.zeros_(model.up[0].weight)
    image = torch.randn(1, 3, 8, 8)
    assert model(image).std(dim=(2, 3)).min() > 0
    seen = []
    model.decoder[0].register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    model(image)
    assert torch.equal(seen[0][:, :4], model.encoder[0](image))
    assert not seen[0][:, 4:].any()


def test_weights_start_with_the_incoming_values(assert_std: Callable[[torch.Tensor, float], None]) -> None:
    model = UNet(depth=2, width=16)
    assert_std(model.encoder[1][0].weight, math.sqrt(2 / (16 * 9)))
    assert_std(model.up[0].weight, math.sqrt(2 / 64))
    assert not model.up[0].bias.any()


def test_example_follows_depth_and_channels() -> None:
    images, target = zoo.describe("unet").example(2, depth=3, in_channels=1, num_classes=4)
    assert (images.shape, target.shape) == ((2, 1, 64, 64), (2, 64, 64))
    images, target = zoo.describe("unet").example(2, image_size=48)
    assert (images.shape, target.shape) == ((2, 3, 48, 48), (2, 48, 48))
