from collections.abc import Callable

import pytest
import torch

from lowtide.app import zoo


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def count_parameters() -> Callable[..., int]:
    """Counts the parameters of a model by name and options, without allocating them."""

    def count(name: str, **options: object) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in zoo.build(name, **options).parameters())

    return count


@pytest.fixture
def assert_std() -> Callable[[torch.Tensor, float], None]:
    """Checks a sample standard deviation: of n normal values it is off by 1 / sqrt(2 n), of which five are allowed."""

    def check(values: torch.Tensor, expected: float) -> None:
        values = values.detach().double()
        assert values.std().item() == pytest.approx(expected, rel=5 / (2 * values.numel()) ** 0.5)
        assert abs(values.mean().item()) < 5 * expected / values.numel() ** 0.5

    return check
