"""Train a small ResNet twice, plainly and with Lowtide, and compare accuracy and memory. Nothing to download.

    make demo            # or: python examples/quickstart.py

The data are digits drawn from a 5 x 7 pixel font, moved, scaled and buried in noise, so that the net has something to
learn. On two CPU cores this takes one to two minutes; a GPU is used if there is one.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo
from lowtide.reports.text import size, table

GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip
STEPS, BATCH, NOISE = 100, 64, 0.5


def digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of 3 x 32 x 32 and their labels."""
    font = torch.tensor([[[float(bit) for bit in row] for row in glyph.split()] for glyph in GLYPHS])
    labels = torch.randint(0, 10, (count,), generator=generator)
    shift = (torch.rand(count, 2, generator=generator) - 0.5) * 0.8
    zoom = 1.2 + 0.8 * torch.rand(count, generator=generator)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = zoom
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, [count, 1, 32, 32], align_corners=False)
    images = F.grid_sample(font[labels].unsqueeze(1), grid, align_corners=False).expand(-1, 3, -1, -1)
    return images + NOISE * torch.randn(images.shape, generator=generator), labels


def train(method: str | None, device: str) -> dict[str, str]:
    """One run; the same seeds for every method, so the same weights and batches."""
    torch.manual_seed(0)
    model: nn.Module = zoo.build("resnet18", num_classes=10, stem="cifar", width=8).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    tide = lowtide.attach(model, method, optimizer=optimizer) if method else None
    generator = torch.Generator().manual_seed(1)
    begin = time.perf_counter()
    for step in range(STEPS):
        images, labels = (part.to(device) for part in digits(BATCH, generator))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 19:
            print(f"  {method or 'plain'}: step {step + 1}/{STEPS}, loss {loss.item():.3f}", flush=True)
    seconds = time.perf_counter() - begin
    model.eval()
    images, labels = (part.to(device) for part in digits(2000, torch.Generator().manual_seed(2)))
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    row = {"method": method or "plain", "test accuracy": f"{100 * accuracy:.1f} %", "time": f"{seconds:.0f} s"}
    if tide is not None:
        totals = tide.report().totals
        row |= {"plain": size(totals["raw_nbytes_peak"]), "held": size(totals["held_nbytes_peak"])}
        row |= {"ratio": f"{totals['ratio']:.1f}x"}
        tide.detach()
    return row


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"ResNet-18 (width 8), {STEPS} steps of {BATCH} images, on {device}")
    rows = [train(method, device) for method in (None, "fixed")]
    heads = ("method", "test accuracy", "plain", "held", "ratio", "time")
    print("\nactivations saved for backward, at their peak:")
    print("\n".join(table(heads, [[row.get(head, "") for head in heads] for row in rows])))


if __name__ == "__main__":
    main()
