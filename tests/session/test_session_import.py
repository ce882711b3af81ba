"""Importing Lowtide costs nothing that was not asked for, and needs nothing but torch."""

from __future__ import annotations

import subprocess
import sys


def _run(code: str) -> str:
    """The output of a fresh interpreter; it inherits the path on which Lowtide was found here."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_import_brings_in_no_compiler_and_no_device():
    code = """
import sys, torch
before = set(sys.modules)
import lowtide
new = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = {"triton", "numpy", "matplotlib", "rich", "torchvision", "scipy", "pandas"} & new
print(sorted(heavy), "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules, torch.cuda.is_initialized())
"""
    assert _run(code) == "[] False False False"


def test_training_works_without_the_optional_packages():
    """With numpy and triton made impossible to import, a step still runs; torch itself tolerates both."""
    code = """
import sys, warnings
for name in ("numpy", "triton", "rich", "matplotlib"):
    sys.modules[name] = None
warnings.simplefilter("ignore")
import torch, lowtide
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
session = lowtide.attach(model, check="full")
model(torch.randn(64, 64)).sum().backward()
session.step()
print(session.report().totals["ratio"] > 1, "torch._dynamo" in sys.modules, torch.cuda.is_initialized())
"""
    assert _run(code) == "True False False"


def test_the_public_names_are_few():
    code = "import lowtide; print(sorted(lowtide.__all__), all(hasattr(lowtide, name) for name in lowtide.__all__))"
    names = ["LowtideError", "LowtideWarning", "Rule", "Session", "__version__", "attach", "compress",
             "find_batch_size", "scale_lr"]  # fmt: skip
    assert _run(code) == f"{names} True"
