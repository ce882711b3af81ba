"""ViT: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021); Ti and S: Touvron et al., DeiT (2021).

Pre-norm encoder with a class token and learned positions. Dropout is where the paper has it: after the positions and
after every dense layer, except the one for queries, keys and values. Initialisation is DeiT's, with a std of 0.02, and
the patch projection is the linear layer it amounts to, with a std of 1 / sqrt(fan_in).
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.initialization import truncated_normal_
from lowtide.app.zoo.tasks import classification_loss, sample_images
from lowtide.app.zoo.transformer import PreNormBlock, SelfAttention


class VisionTransformer(nn.Module):
    """A transformer over the square patches of a picture, classified from the class token.

    Args:
        num_classes: number of logits.
        image_size: pixels a side, a multiple of `patch_size`; other pictures are refused, for lack of positions.
        patch_size: pixels a side of a patch.
        depth: number of blocks.
        width: features per patch.
        heads: attention heads, a divisor of `width`.
        dropout: probability of dropout.
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        image_size: int = 224,
        patch_size: int = 16,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size % patch_size != 0:
            raise ValueError(f"ViT needs whole patches, got image_size={image_size} and patch_size={patch_size}")
        self.image_size = image_size
        self.patch_embed = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (image_size // patch_size) ** 2, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_make_block(width, heads, dropout=dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, image_size, image_size) pictures to (batch, num_classes) logits."""
        if images.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"this ViT has positions for {self.image_size} x {self.image_size} pixels, got {tuple(images.shape)}; "
                "build it with the image_size of the data"
            )
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1)
        tokens = self.norm(self.blocks(self.dropout(tokens + self.pos_embed)))
        logits: Tensor = self.head(tokens[:, 0])
        return logits

    def _initialize(self) -> None:
        truncated_normal_(self.cls_token, 0.02)
        truncated_normal_(self.pos_embed, 0.02)
        truncated_normal_(self.patch_embed.weight, 1 / math.sqrt(self.patch_embed.weight[0].numel()))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                truncated_normal_(layer.weight, 0.02)
            if isinstance(layer, nn.Linear | nn.Conv2d) and layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _make_block(width: int, heads: int, *, dropout: float) -> PreNormBlock:
    mlp = nn.Sequential(
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, width),
        nn.Dropout(dropout),
    )
    attention = SelfAttention(width, heads, causal=False, dropout=dropout)
    return PreNormBlock(attention, mlp, width=width, eps=1e-6)


ENTRIES = tuple(
    ZooEntry(
        name=name,
        kind="image",
        builder=partial(VisionTransformer, width=width, heads=heads),
        sampler=sample_images,
        loss=classification_loss,
        tiny={"num_classes": 10, "image_size": 32, "patch_size": 8, "depth": 2, "width": 16 * heads, "heads": heads},
    )
    for name, width, heads in (
        ("vit_ti_16", 192, 3),
        ("vit_s_16", 384, 6),
        ("vit_b_16", 768, 12),
    )
)
