"""Every method trains every model of the zoo, in float32 and under autocast."""

from __future__ import annotations

import pytest
from zoo_training import assert_goes_well, train

from lowtide.app import zoo
from lowtide.registry import METHODS


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS.names())
@pytest.mark.parametrize("model", zoo.names())
def test_twenty_steps(model: str, method: str, bf16: bool) -> None:
    assert_goes_well(train(model, method, bf16=bf16))
