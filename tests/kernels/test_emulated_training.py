"""Whole trainings on the kernels of ``sz``, in the emulator: weights are bit-equal to those that plain torch leads to.

What is stored depends on the bound and the seed alone, so neither the coder's kernels nor the way in which payloads get
their room may change a bit of what backward reads, nor may a gradient that passes through a payload.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from simt import Emulated, EmulatedFunction, requires_compiler
from test_kernel_sz_cuda import emulated
from torch import Tensor, nn

import lowtide
from lowtide import kernels
from lowtide.app import zoo
from lowtide.kernels import _fold, _rows, _sz_cuda, _sz_functions
from lowtide.kernels._sz_cuda import SzCuda

pytestmark = requires_compiler

STEPS = 6


def train(
    name: str, method: str, *, bf16: bool, backend: str | None = None, min_size: int = 4096, **options: Any
) -> tuple[list[Tensor], lowtide.Session]:
    """The weights after some steps, compiled if a backend is named; conv nets are channels_last in bf16."""
    entry = zoo.describe(name)
    torch.manual_seed(0)
    model = entry.build(**entry.tiny)
    inputs, target = entry.example(4, **entry.tiny)
    if bf16 and inputs.dim() == 4:
        model.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    tide = lowtide.attach(model, method, optimizer=optimizer, min_size=min_size, **options)
    if backend is not None:
        tide.compile(backend=backend, fullgraph=True)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(inputs)
        entry.loss(output.float(), target).backward()
        optimizer.step()
    tide.detach()
    return [part.detach() for part in model.parameters()], tide


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Has ``sz`` and what folds pairs launch kernels, which are counted by name; small tensors stand for large ones.

    Rows are measured by torch: their standard deviations differ by roundings.
    """
    twin, launched = kernels.twin, Counter[str]()

    def of_sz(kernel: str, *given: Any, **options: Any) -> EmulatedFunction:
        give = options.get("give")
        is_plain = give in (None, _sz_functions.VALUES, _sz_functions.MASK)
        launched[kernel if is_plain else "gate" if give == _sz_functions.GATED else "unfold"] += 1
        launched["predicted"] += options["predicted"]
        return emulated(kernel, *given, **options)

    def of_pairs(kernel: str, device: int) -> EmulatedFunction:
        launched[kernel.partition("<")[0]] += 1
        return Emulated(_fold.PROGRAM).function(kernel)

    stand_ins: dict[Any, dict[str, Any]] = {
        kernels: {"twin": lambda codec, *like: SzCuda.of(codec) if codec.name == "sz" else twin(codec, *like)},
        _sz_cuda: {
            "_function": of_sz, "_processors": lambda device: 1, "_SMALL": 0, "missing": lambda *given, **options: [],
            "current_stream": lambda device: 0,
        },
        _fold: {"_function": of_pairs, "_has_kernel": lambda x: True, "current_stream": lambda device: 0},
        _rows: {"measure": lambda *given: None},
    }  # fmt: skip
    for owner, names in stand_ins.items():
        for name, stand_in in names.items():
            monkeypatch.setattr(owner, name, stand_in)
    return launched


def train_on_smooth_maps(predict: str) -> tuple[list[Tensor], int]:
    """The weights after some steps, and what was held in the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 5, padding=2), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1)),
        *(nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    x = nn.functional.interpolate(torch.randn(4, 3, 6, 6), size=48, mode="bicubic")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    options = {"coder": "rans", "norm": "0.2 std", "linear": "0.2 std", "remake": True, "predict": predict}
    tide = lowtide.attach(model, "fixed", optimizer=optimizer, min_size=4096, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        held = tide.ledger.held
        loss.backward()
        optimizer.step()
    tide.detach()
    return [part.detach() for part in model.parameters()], held


def test_prediction_changes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen for norm inputs and the like, and takes less; pairs of batch norm and ReLU go without."""
    launched = as_on_a_gpu(monkeypatch)
    weights, held = train_on_smooth_maps("off")
    assert not launched["predicted"]
    predicted, less = train_on_smooth_maps("row")
    assert launched["predicted"] > STEPS and launched["fold"] + launched["unfold"] > 0
    assert all(torch.equal(a, b) for a, b in zip(weights, predicted, strict=True))
    assert less < 0.9 * held


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "budget": ("budget", {}),
    "rans": ("fixed", {"coder": "rans", "check": True}),
    "blocks": ("fixed", {"coder": "blocks", "check": True}),
    "remake": ("fixed", {"coder": "rans", "remake": True}),
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_weights_are_bit_equal(name: str, case: str, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    method, options = CASES[case]
    plain, _ = train(name, method, bf16=bf16, **options)
    launched = as_on_a_gpu(monkeypatch)
    weights, tide = train(name, method, bf16=bf16, **options)
    wanted = {"rans": {"rans_encode", "rans_decode"}, "blocks": {"blocks_encode", "blocks_decode"}}.get(case, set())
    if name == "resnet18":
        wanted |= {"gate"} if case in ("rans", "blocks") else {"gate", "tabulate", "fold", "unfold"}
    assert wanted <= set(launched), launched
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    assert tide.ledger.held == 0
