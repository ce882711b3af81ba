"""The weight initialisations that more than one family uses."""

from torch import Tensor, nn


def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill with N(0, std²) cut at ±3 std, which makes the standard deviation 0.9866 std.

    `torch.nn.init.trunc_normal_` cuts at ±2 in units of the weight: 100 standard deviations at the usual 0.02, that is
    nowhere, and where it samples through the inverse error function, as older torch does, it can return that limit.
    """
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def initialize_convolutions_(module: nn.Module) -> None:
    """He et al., "Delving Deep into Rectifiers" (2015): convolutions N(0, 2 / fan_out), normalisations 1, biases 0.

    The fan-out form keeps the variance of the gradients through a ReLU, and is what ResNet and VGG are trained with.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
