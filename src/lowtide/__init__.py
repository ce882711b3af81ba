"""Lowtide: train PyTorch models in a fraction of the activation memory, under an error bound that is checked."""

from lowtide._version import __version__
from lowtide.errors import LowtideError, LowtideWarning
from lowtide.growth import find_batch_size, scale_lr
from lowtide.policies.rules import Rule
from lowtide.session import Session, attach, compress

__all__ = [
    "LowtideError",
    "LowtideWarning",
    "Rule",
    "Session",
    "__version__",
    "attach",
    "compress",
    "find_batch_size",
    "scale_lr",
]
