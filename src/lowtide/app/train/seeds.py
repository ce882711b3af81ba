"""Random numbers as functions of the seed and the step alone, so that a run which begins in its middle has the same."""

from __future__ import annotations

import random

import torch

ORDER, AUGMENT, STEP = range(3)  # streams that do not share numbers
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A seed of 63 bits from several numbers: SplitMix64 (Steele et al., 2014) over each in turn."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def generator(*numbers: int) -> torch.Generator:
    """A generator on the CPU: what it draws does not depend on the device that trains."""
    return torch.Generator().manual_seed(mix(*numbers))


def seed_everything(*numbers: int) -> None:
    """The global generators, which dropout and models of the user draw from."""
    seed = mix(*numbers)
    # As torch.manual_seed, which asks for every kind of device that there is, at many times the cost.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for device in torch.cuda.default_generators:
            device.manual_seed(seed)
    random.seed(seed)
