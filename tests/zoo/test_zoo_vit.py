import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.app import zoo
from lowtide.app.zoo.vit import VisionTransformer

# Cutting a normal distribution at ±3 leaves this much of its standard deviation.
CUT = 0.98658


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    assert count_parameters("vit_b_16") == 86_567_656
    assert count_parameters("vit_s_16") == 22_050_664
    assert count_parameters("vit_ti_16") == 5_717_416


def test_weights_start_truncated_normal(assert_std: Callable[[torch.Tensor, float], None]) -> None:
    model = VisionTransformer(image_size=64, patch_size=8, depth=2, width=96, heads=3, num_classes=100)
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert len(linears) == 2 * 4 + 1
    for layer in linears:
        assert_std(layer.weight, 0.02 * CUT)
        assert layer.weight.abs().max() <= 0.06
        assert not layer.bias.any()
    assert_std(model.pos_embed, 0.02 * CUT)
    assert_std(model.cls_token, 0.02 * CUT)
    assert_std(model.patch_embed.weight, CUT / math.sqrt(3 * 8 * 8))
    assert not model.patch_embed.bias.any()


def test_without_positions_the_order_of_patches_is_lost() -> None:
    """Swapping the left and right halves, each one patch wide, permutes the patches and nothing else."""
    model = VisionTransformer(image_size=16, patch_size=8, depth=2, width=12, heads=3, num_classes=5).double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert not torch.allclose(model(images), model(images.roll(8, dims=-1)))
    nn.init.zeros_(model.pos_embed)
    torch.testing.assert_close(model(images), model(images.roll(8, dims=-1)), rtol=1e-12, atol=1e-12)


def test_dropout_follows_the_paper() -> None:
    model = zoo.build("vit_ti_16", dropout=0.3, depth=2)
    # After the positions, and per block after the attention's projection and both layers of the MLP.
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.3] * (1 + 2 * 3)
    assert all(block.attn.attention_dropout == 0.0 for block in model.blocks)


def test_it_refuses_partial_patches() -> None:
    with pytest.raises(ValueError, match=r"whole patches, got image_size=30 and patch_size=16"):
        zoo.build("vit_ti_16", image_size=30)


def test_it_refuses_pictures_of_another_size() -> None:
    model = zoo.build("vit_ti_16", **zoo.describe("vit_ti_16").tiny)
    with pytest.raises(ValueError, match=r"positions for 32 x 32 pixels, got \(1, 3, 64, 32\); build it with"):
        model(torch.zeros(1, 3, 64, 32))
