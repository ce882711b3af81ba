"""Every method trains every model of the zoo on a device, in float32 and under autocast."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowtide.app import zoo
from lowtide.registry import METHODS

sys.path.append(str(Path(__file__).resolve().parents[1] / "methods"))
from zoo_training import assert_goes_well, train

# Attention has no deterministic backward everywhere, and here it only matters that the loss falls.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS.names())
@pytest.mark.parametrize("model", zoo.names())
def test_twenty_steps(model: str, method: str, bf16: bool) -> None:
    assert_goes_well(train(model, method, bf16=bf16, device="cuda"))
