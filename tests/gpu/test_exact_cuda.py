"""Every model of the zoo on a device: bit-equal to plain training under "exact", sound under "fixed"."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train import Problem, assert_bit_equal, attached, codecs_of, plainly, train

from lowtide import kernels
from lowtide.app import zoo
from lowtide.registry import CODECS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
]
STEPS = 3
IMAGES = [name for name in zoo.names() if zoo.describe(name).kind in ("image", "segmentation")]
precisions = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
REPEATABLE = ("resnet18", "resnet50", "gpt2_small", "lstm")
MASKED = ("alexnet", "vgg16", "unet", "resnet18", "resnet50")


def make_problem(name: str, *, bf16: bool, channels_last: bool = False) -> Problem:
    """The model at its tiny size and its synthetic batches, on the device."""
    entry = zoo.describe(name)
    building = {option: value for option, value in entry.tiny.items() if option in entry.options}

    def sample(generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(item.cuda() for item in entry.example(4, generator=generator, **entry.tiny))

    def score(model: torch.nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            output = model(inputs)
            if entry.kind != "segmentation":
                return entry.loss(output, target)
            # The same loss; the one for planes adds up in any order on a device.
            return F.cross_entropy(output.movedim(1, -1).flatten(0, -2), target.flatten())

    return Problem(lambda: entry.build(**building).cuda(), sample, score, channels_last=channels_last)


def _be_as_strict_as_possible(problem: Problem) -> None:
    """Deterministic mode, but for a model with an op that has no such mode: there, ops without one are let through."""
    torch.use_deterministic_algorithms(True)
    try:
        train(problem, plainly, steps=1)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)


def assert_exact(name: str, *, bf16: bool, channels_last: bool = False) -> None:
    problem = make_problem(name, bf16=bf16, channels_last=channels_last)
    _be_as_strict_as_possible(problem)
    plain, again = (train(problem, plainly, steps=STEPS)[0] for _ in range(2))
    unstable = [key for key in plain if not torch.equal(plain[key], again[key])]
    if unstable and name not in REPEATABLE:
        pytest.skip(f"plain training of {name} does not repeat itself on this device, beginning with {unstable[0]}")
    assert not unstable, f"plain training of {name} does not repeat itself, beginning with {unstable[0]}"
    trace, session = train(problem, attached("exact"), steps=STEPS)
    assert session is not None
    assert_bit_equal(trace, plain)
    assert all(value.is_cuda for key, value in trace.items() if "gradient" in key)
    used = codecs_of(session)
    assert name not in MASKED or "bitmask" in used, f"at work were {used}"
    assert (session.ledger.raw, session.ledger.held) == (0, 0), "backward left something held"


@precisions
@pytest.mark.parametrize("name", zoo.names())
def test_exact_is_bit_equal(name: str, bf16: bool) -> None:
    assert_exact(name, bf16=bf16)


@precisions
@pytest.mark.parametrize("name", IMAGES)
def test_exact_is_bit_equal_in_channels_last(name: str, bf16: bool) -> None:
    assert_exact(name, bf16=bf16, channels_last=True)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the tensors that the twin encodes, in order."""
    seen: list[torch.dtype] = []
    twin = type(kernels.twin(CODECS.create("sz"), torch.device("cuda"), torch.float32))
    encode = twin.encode

    def note(self, x, *arguments, **options):
        assert x.is_cuda
        seen.append(x.dtype)
        return encode(self, x, *arguments, **options)

    monkeypatch.setattr(twin, "encode", note)
    return seen


@pytest.mark.parametrize(
    ("name", "bf16"), [*((name, False) for name in zoo.names()), ("resnet18", True), ("gpt2_small", True)]
)
def test_fixed_trains_within_its_bounds(name: str, bf16: bool, encoded: list[torch.dtype]) -> None:
    """``check=True`` compares samples of what backward reads with what was saved; a broken bound raises."""
    problem = make_problem(name, bf16=bf16)
    trace, session = train(problem, attached("fixed", check=True), steps=STEPS)
    assert session is not None
    gradients = [value for key, value in trace.items() if "gradient" in key]
    assert gradients and all(bool(value.isfinite().all()) for value in gradients)
    assert any(bool(value.any()) for value in gradients)
    assert (session.ledger.raw, session.ledger.held) == (0, 0), "backward left something held"
    assert session.ledger.step == STEPS
    if "sz" in codecs_of(session):
        assert torch.bfloat16 in encoded if bf16 else torch.float32 in encoded, "the twin was not at work"
    else:
        assert name == "lstm", f"nothing lossy was at work: {codecs_of(session)}"
