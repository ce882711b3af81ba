"""Testing with mirror images: what is averaged, that it changes tests alone, and that it is for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.app.train.config import Config
from lowtide.app.train.prepare import understand
from lowtide.app.train.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def make(net: str) -> Iterator[Any]:
    """A trainer after two steps, so that its norms and weights are no longer those of a new net."""
    made: list[Trainer] = []

    def build(mirror: bool | None, model: Mapping[str, Any] | None = None, **settings: Any) -> Trainer:
        config, data, module = understand(
            Config.read(
                {
                    "model": model or {"name": net},
                    "data": {"name": "digits", "options": {"train": 64, "test": 80}},
                    "train": {"batch": 32, "label_smoothing": 0.1, **settings},
                    "augment": {} if mirror is None else {"test_mirror": mirror},
                }
            )
        )
        trainer = Trainer(config, data, module, CPU)
        made.append(trainer)
        for number in range(2):
            trainer.step(number)
        return trainer

    yield build
    for trainer in made:
        trainer.close()


def _given_in_tests(trainer: Trainer) -> list[Tensor]:
    """The inputs of the model during an evaluation."""
    given: list[Tensor] = []
    handle = trainer.model.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    trainer.evaluate()
    handle.remove()
    return given


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_outputs_for_a_picture_and_its_mirror_image_are_averaged(make, precision):
    trainer = make(True, precision=precision)
    model, outputs, labels = trainer.model.eval(), [], []
    with torch.no_grad():
        for images, targets in trainer.batches.testing():
            shown = trainer.pictures.testing(images)
            reversed_columns = shown[:, :, :, torch.arange(shown.shape[3] - 1, -1, -1)]
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                outputs.append([model(shown), model(reversed_columns)])
            labels.append(targets)
    logits = torch.cat([torch.stack(pair).float().mean(0) for pair in outputs])
    targets = torch.cat(labels)
    accuracy, loss = trainer.evaluate()
    assert accuracy == (logits.argmax(1) == targets).double().mean().item()
    assert loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)  # of the average, without smoothing
    assert model.training


def test_without_it_every_picture_is_shown_once(make):
    once, never = make(False), make(None)
    assert once.evaluate() == never.evaluate()
    assert [len(given) for given in _given_in_tests(once)] == [32, 32, 16]
    both = make(True)
    assert both.evaluate()[1] != once.evaluate()[1]
    assert [len(given) for given in _given_in_tests(both)] == [32, 32, 32, 32, 16, 16]


def test_mirror_images_have_the_memory_layout_of_the_pictures(make):
    three_channels = {"name": "resnet18", "options": {"width": 4}}  # with one, every layout is channels last
    for given in _given_in_tests(make(True, three_channels, channels_last=True)):
        assert given.shape[1] == 3 and given.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("method", ["plain", "fixed"])
def test_training_is_the_same(train, tmp_path, read_weights, read_lines, assert_same, method):
    (tmp_path / "my.toml").write_text("[augment]\ntest_mirror = true\nflip = true\n")
    assert train("--method", method, "--test-mirror", "--flip", "--out", "with") == 0
    assert train("--method", method, "--config", "my.toml", "--no-test-mirror", "--out", "without") == 0
    assert "test_mirror = true" in (tmp_path / "with" / "config.toml").read_text()
    assert "test_mirror = false" in (tmp_path / "without" / "config.toml").read_text()
    assert_same(read_weights(tmp_path / "with"), read_weights(tmp_path / "without"))
    rows = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("with", "without")]
    trained, tested = (
        [[row["loss"] for row in part if row["kind"] == kind] for part in rows] for kind in ("step", "eval")
    )
    assert trained[0] == trained[1]
    assert all(one != other for one, other in zip(*tested, strict=True))


def test_text_has_no_mirror_image(lowtide, tmp_path, capsys):
    (tmp_path / "words.txt").write_text("the tide is low and the tide is high " * 60)
    arguments = ("train", "--model", "gpt", "--data", "text:words.txt", "--data-option", "length=8", "--device", "cpu")
    assert lowtide(*arguments, "--test-mirror") == 2
    assert capsys.readouterr().err == "lowtide: augmentation is for pictures, data set 'text' has none\n"
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]
