"""Does it work with the model that I have? Diffusion models, and nets of plain torch that are unlike transformers.

    pip install diffusers
    PYTHONPATH=src python benchmarks/architectures_others.py [unet_2d,flux,nnunet,...] [--precision fp32,bf16]

Small, with random weights that are half as large again as they are to begin with, on one batch: the measurements of
architectures.py. Models that begin with weights of zero get small ones there, since no gradient passes them.
Names under "torch" need no package. Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from architectures import Bench, is_fine, measure_all, show
from torch import Tensor, nn

from lowtide.app.shared import arguments
from lowtide.app.shared.rows import ENVIRONMENT
from lowtide.app.shared.script import run_script
from lowtide.app.shared.specs import UsageError

COLUMNS = (
    *ENVIRONMENT,
    *("diffusers", "architecture", "precision", "parameters", "ok", "repeats", "exact", "noise", "smaller"),
    *("kept_share", "kept_because", "error"),
)

_STEPS = torch.tensor([1, 20, 300, 700])  # of the diffusion, one for each sample
_UNET = {"block_out_channels": (32, 64), "norm_num_groups": 8}
_VAE = {**_UNET, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "latent_channels": 4, "sample_size": 32,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
_CROSS = {**_UNET, "in_channels": 4, "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 4,
          "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}  # fmt: skip
_TOKENS = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
_FEW_CHANNELS = {"in_channels": 4, "out_channels": 4}


def _image(*shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": torch.randn(4, *shape), "timestep": _STEPS}


def _flux() -> dict[str, Any]:
    places = torch.zeros(64, 3)
    places[:, 1], places[:, 2] = torch.arange(64) // 8, torch.arange(64) % 8
    return {"hidden_states": torch.randn(2, 64, 16), "encoder_hidden_states": torch.randn(2, 12, 32),
            "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([0.1, 0.7]), "img_ids": places,
            "txt_ids": torch.zeros(12, 3)}  # fmt: skip


# By name: the class, its configuration, and what forward is given.
DIFFUSERS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "unet_2d": ("UNet2DModel", {**_UNET, "sample_size": 16, "layers_per_block": 2,
                                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                                "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, _image(3, 16, 16)),
    "unet_2d_condition": (
        "UNet2DConditionModel", {**_CROSS, "sample_size": 16, "out_channels": 4,
                                 "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        lambda: {**_image(4, 16, 16)(), "encoder_hidden_states": torch.randn(4, 7, 32)}),
    "controlnet": (
        "ControlNetModel", {**_CROSS, "conditioning_embedding_out_channels": (16, 32)},
        lambda: {**_image(4, 16, 16)(), "encoder_hidden_states": torch.randn(4, 7, 32),
                 "controlnet_cond": torch.randn(4, 3, 32, 32)}),
    "unet_3d_condition": (
        "UNet3DConditionModel", {**_FEW_CHANNELS, "sample_size": 8, "layers_per_block": 1, "attention_head_dim": 8,
                                 "block_out_channels": (32, 32), "cross_attention_dim": 16, "norm_num_groups": 8,
                                 "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                                 "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        lambda: {"sample": torch.randn(2, 4, 4, 8, 8), "timestep": _STEPS[:2],
                 "encoder_hidden_states": torch.randn(2, 5, 16)}),
    "autoencoder_kl": ("AutoencoderKL", _VAE, lambda: {"sample": torch.randn(2, 3, 32, 32), "sample_posterior": True}),
    "vq_model": ("VQModel", {**_VAE, "num_vq_embeddings": 32}, lambda: {"sample": torch.randn(2, 3, 32, 32)}),
    "autoencoder_dc": (
        "AutoencoderDC", {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 32,
                          **{f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in {
                              "block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (32, 64),
                              "layers_per_block": (1, 1), "qkv_multiscales": ((), (5,))}.items()}},
        lambda: {"sample": torch.randn(2, 3, 32, 32)}),
    "autoencoder_cogvideox": (
        "AutoencoderKLCogVideoX", {"down_block_types": ("CogVideoXDownBlock3D",) * 2, "latent_channels": 4,
                                   "up_block_types": ("CogVideoXUpBlock3D",) * 2, "block_out_channels": (16, 16),
                                   "layers_per_block": 1, "norm_num_groups": 4, "temporal_compression_ratio": 2},
        lambda: {"sample": torch.randn(1, 3, 5, 16, 16)}),
    "dit": ("DiTTransformer2DModel", {**_TOKENS, **_FEW_CHANNELS, "sample_size": 16, "num_embeds_ada_norm": 1000,
                                      "norm_num_groups": 8},
            lambda: {"hidden_states": torch.randn(4, 4, 16, 16), "timestep": _STEPS, "class_labels": _STEPS // 100}),
    "pixart": ("PixArtTransformer2DModel", {**_TOKENS, "in_channels": 4, "out_channels": 8, "cross_attention_dim": 64,
                                            "sample_size": 16, "caption_channels": 32,
                                            "use_additional_conditions": False},
               lambda: {"hidden_states": torch.randn(4, 4, 16, 16), "encoder_hidden_states": torch.randn(4, 9, 32),
                        "timestep": _STEPS, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}),
    "sd3": ("SD3Transformer2DModel", {**_TOKENS, **_FEW_CHANNELS, "sample_size": 16, "joint_attention_dim": 32,
                                      "caption_projection_dim": 64, "pooled_projection_dim": 64,
                                      "pos_embed_max_size": 16},
            lambda: {"hidden_states": torch.randn(4, 4, 16, 16), "encoder_hidden_states": torch.randn(4, 12, 32),
                     "pooled_projections": torch.randn(4, 64), "timestep": _STEPS}),
    "flux": ("FluxTransformer2DModel", {**_TOKENS, "in_channels": 16, "num_single_layers": 2, "joint_attention_dim": 32,
                                        "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)}, _flux),
    "sana": ("SanaTransformer2DModel", {**_FEW_CHANNELS, **_TOKENS, "num_cross_attention_heads": 2,
                                        "cross_attention_head_dim": 32, "cross_attention_dim": 64,
                                        "caption_channels": 16, "sample_size": 16},
             lambda: {"hidden_states": torch.randn(4, 4, 16, 16), "encoder_hidden_states": torch.randn(4, 9, 16),
                      "timestep": _STEPS}),
    "cogvideox": ("CogVideoXTransformer3DModel", {**_TOKENS, **_FEW_CHANNELS, "time_embed_dim": 16, "sample_frames": 8,
                                                  "text_embed_dim": 16, "sample_width": 8, "sample_height": 8,
                                                  "max_text_seq_length": 8},
                  lambda: {"hidden_states": torch.randn(2, 3, 4, 8, 8), "timestep": _STEPS[:2],
                           "encoder_hidden_states": torch.randn(2, 8, 16)}),
    "wan": ("WanTransformer3DModel", {**_TOKENS, **_FEW_CHANNELS, "text_dim": 16, "freq_dim": 16, "ffn_dim": 128,
                                      "rope_max_seq_len": 32},
            lambda: {"hidden_states": torch.randn(2, 4, 3, 8, 8), "timestep": _STEPS[:2],
                     "encoder_hidden_states": torch.randn(2, 8, 16)}),
}  # fmt: skip


class _Stream(nn.Module):
    """What a block makes, added to what it was given."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def _nnunet(wide: int) -> list[nn.Module]:
    return [nn.Conv3d(wide, wide, 3, padding=1), nn.InstanceNorm3d(wide, affine=True), nn.LeakyReLU(0.01, inplace=True)]


def _cyclegan(wide: int) -> nn.Module:
    def conv() -> list[nn.Module]:
        return [nn.ReflectionPad2d(1), nn.Conv2d(wide, wide, 3), nn.InstanceNorm2d(wide)]

    return _Stream(*conv(), nn.ReLU(inplace=True), *conv())


def _iresnet(wide: int) -> nn.Module:
    return _Stream(nn.BatchNorm2d(wide), nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide),
                   nn.PReLU(wide), nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide))  # fmt: skip


def _conv_tasnet(wide: int) -> nn.Module:
    between = [nn.PReLU(), nn.GroupNorm(1, 2 * wide)]
    deep = nn.Conv1d(2 * wide, 2 * wide, 3, padding=2, dilation=2, groups=2 * wide)
    after = [nn.PReLU(), nn.GroupNorm(1, 2 * wide)]
    return _Stream(nn.Conv1d(wide, 2 * wide, 1), *between, deep, *after, nn.Conv1d(2 * wide, wide, 1))


class _Messages(nn.Module):
    """A graph net: what an edge says is made of both its ends, and added up where it leads."""

    def __init__(self, wide: int, edges: Tensor) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * wide, wide), nn.SiLU(), nn.Linear(wide, wide))
        self.update = nn.Linear(2 * wide, wide)
        self.edges = edges

    def forward(self, x: Tensor) -> Tensor:
        start, end = self.edges
        said = self.message(torch.cat([x[start], x[end]], 1))
        heard = torch.zeros_like(x).index_add(0, end, said)
        return x + F.relu(self.update(torch.cat([x, heard], 1)))


class _Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wide, wide, 6, 5, dtype=torch.cfloat) / wide)
        self.beside = nn.Conv2d(wide, wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x.float())
        low = torch.einsum("bixy,ioxy->boxy", waves[:, :, :6, :5], self.weight)
        waves = F.pad(low, (0, waves.shape[3] - 5, 0, waves.shape[2] - 6))
        return F.gelu(torch.fft.irfft2(waves, s=x.shape[2:]) + self.beside(x))


# By name: layers, and what the first one is given.
TORCH: dict[str, Callable[[], tuple[list[nn.Module], Tensor]]] = {
    "nnunet": lambda: ([nn.Conv3d(1, 16, 3), *_nnunet(16), *_nnunet(16), *_nnunet(16), nn.Conv3d(16, 3, 1)],
                       torch.randn(2, 1, 14, 14, 14)),
    "cyclegan": lambda: ([nn.Conv2d(3, 32, 3), _cyclegan(32), _cyclegan(32), nn.Conv2d(32, 3, 3), nn.Tanh()],
                         torch.randn(4, 3, 24, 24)),
    "iresnet": lambda: ([nn.Conv2d(3, 32, 3), _iresnet(32), _iresnet(32), nn.Conv2d(32, 8, 3)],
                        torch.randn(8, 3, 20, 20)),
    "conv_tasnet": lambda: ([nn.Conv1d(1, 32, 16, 8), _conv_tasnet(32), _conv_tasnet(32), nn.Conv1d(32, 32, 1)],
                            torch.randn(8, 1, 1600)),
    "graph_net": lambda: ([nn.Linear(8, 64), *(_Messages(64, torch.randint(0, 300, (2, 1200))) for _ in range(2)),
                           nn.Linear(64, 4)], torch.randn(300, 8)),
    "fourier_operator": lambda: ([nn.Conv2d(3, 32, 1), _Spectral(32), _Spectral(32), nn.Conv2d(32, 1, 1)],
                                 torch.randn(8, 3, 20, 20)),
}  # fmt: skip


def bench_of(name: str, precision: str) -> Bench:
    """A model with larger weights than it begins with, and the mean squared error of all it makes."""
    torch.manual_seed(0)
    if name in TORCH:
        layers, x = TORCH[name]()
        model: nn.Module = nn.Sequential(*layers)
        inputs: dict[str, Any] = {"input": x}
    else:
        import diffusers

        kind, configuration, make = DIFFUSERS[name]
        model, inputs = getattr(diffusers, kind)(**configuration), make()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                _ = weight.mul_(1.5) if weight.any() else weight.normal_(0, 0.05)
    return Bench(model.train(), lambda model: _loss(model(**inputs)), precision)


def _loss(made: Any) -> Tensor:
    """Against fixed random numbers, of everything that a model makes."""
    parts = [made] if isinstance(made, Tensor) else [*made.values()]
    found = [each for part in parts for each in (part if isinstance(part, list | tuple) else [part])]
    loss = torch.zeros(())
    for part in found:
        if isinstance(part, Tensor) and part.requires_grad:
            target = torch.randn(part.shape, generator=torch.Generator().manual_seed(2))
            loss = loss + F.mse_loss(part.float(), target)
    return loss


def configure(parser: argparse.ArgumentParser) -> None:
    add, names = parser.add_argument, ",".join((*DIFFUSERS, *TORCH))
    add("architectures", nargs="?", default=names, metavar="NAMES", help="(default: all)")
    add("--precision", default="fp32,bf16", help="of fp32, bf16 (autocast) (default: %(default)s)")
    add("--steps", type=int, default=18, help="in which bounds set themselves (default: %(default)s)")
    arguments.add_output(parser, out="benchmarks/results/architectures_others.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments.require_positive(options, "steps")
    names, precisions = options.architectures.split(","), options.precision.split(",")
    unknown = [name for name in names if name not in DIFFUSERS and name not in TORCH]
    unknown += [name for name in precisions if name not in ("fp32", "bf16")]
    if unknown:
        known = ", ".join((*DIFFUSERS, *TORCH))
        raise UsageError(f"{', '.join(unknown)}: not known here; known: {known}; fp32, bf16")
    version = ""
    if any(name in DIFFUSERS for name in names):
        try:
            import diffusers
        except ImportError:
            raise UsageError(
                "this measures models of diffusers, which is not installed: pip install diffusers, or name models of "
                f"plain torch: {','.join(TORCH)}"
            ) from None
        diffusers.logging.set_verbosity_error()
        version = diffusers.__version__
    return measure_all({name: bench_of for name in names}, precisions, options, COLUMNS, {"diffusers": version})


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show, is_fine=is_fine))
