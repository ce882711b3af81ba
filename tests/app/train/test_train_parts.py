"""The parts of a step: rates, seeds, augmentation, batches, optimizers, what is chosen where nothing is given."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from lowtide.app import data, zoo
from lowtide.app.data import DataSet, Table
from lowtide.app.models import find_model
from lowtide.app.shared.specs import UsageError
from lowtide.app.train import batches as batches_module
from lowtide.app.train import seeds
from lowtide.app.train.augment import Pictures
from lowtide.app.train.batches import Batches
from lowtide.app.train.config import Augment, Config, Optimizer
from lowtide.app.train.optimizers import make_optimizer
from lowtide.app.train.recipe import resolve, resolve_method
from lowtide.app.train.schedules import make_schedule
from lowtide.errors import UnknownNameError
from lowtide.optim import LARS

CPU = torch.device("cpu")


@pytest.mark.parametrize(("steps", "warmup"), [(100, 0.3), (37, 0.25), (10, 0.4)])
def test_one_cycle_is_torchs(steps: int, warmup: float):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    torchs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.4, total_steps=steps, pct_start=warmup, cycle_momentum=False
    )
    ours = make_schedule("onecycle", lr=0.4, steps=steps, warmup=warmup)
    for step in range(steps):
        assert ours(step) == pytest.approx(torchs.get_last_lr()[0], rel=1e-9, abs=1e-12)
        if step < steps - 1:
            optimizer.step()
            torchs.step()


@pytest.mark.parametrize("warmup", [0.0, 0.004, 1.0])
def test_one_cycle_at_its_edges_is_finite_and_no_higher_than_its_top(warmup: float):
    rates = [make_schedule("onecycle", lr=0.4, steps=5, warmup=warmup)(step) for step in range(5)]
    assert all(0 < rate <= 0.4 for rate in rates)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
     ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447])],
)  # fmt: skip
def test_the_other_schedules(name: str, wanted: list[float]):
    rate = make_schedule(name, lr=1.0, steps=6, warmup=1 / 3)
    assert [rate(step) for step in range(6)] == pytest.approx(wanted, abs=1e-6)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UnknownNameError, match=r"unknown schedule 'cosin'.*Did you mean 'cosine'"):
        make_schedule("cosin", lr=1, steps=1, warmup=0)


def test_seeds_of_neighbours_share_nothing():
    found = {seeds.mix(seed, stream, step) for seed in range(20) for stream in range(3) for step in range(50)}
    assert len(found) == 20 * 3 * 50
    assert seeds.mix(1, 2) != seeds.mix(2, 1)
    assert all(0 <= seed < 2**63 for seed in found)


def test_the_global_generators_follow_seed_and_step():
    def draw(*numbers: int) -> tuple[float, float]:
        seeds.seed_everything(*numbers)
        return float(torch.rand(())), random.random()

    assert draw(1, 5) == draw(1, 5)
    assert draw(1, 5) != draw(1, 6)


def _pictures(
    shape: tuple[int, ...] = (3, 8, 8), channels: int | None = 3, seed: int = 0, **augment: object
) -> Pictures:
    scale = ((0.0,) * shape[0], (1.0,) * shape[0])  # values stay what the bytes were
    options = {"crop": 0, "flip": False, "cutout": 0, "resized_crop": 0.0, **augment}
    return Pictures(
        Augment(**options), scale=scale, shape=shape, channels=channels, device=CPU, channels_last=False, seed=seed
    )


def _random_images(count: int = 64, shape: tuple[int, ...] = (3, 8, 8)) -> Tensor:
    return torch.randint(1, 256, (count, *shape), dtype=torch.uint8)


def test_a_move_is_a_crop_of_the_picture_reflected_at_its_border():
    images = _random_images()
    moved = _pictures(crop=2, flip=True).training(images, 3)
    padded = nn.functional.pad(images.float(), (2, 2, 2, 2), mode="reflect")
    crops = {(y, x): padded[:, :, y : y + 8, x : x + 8] for y in range(5) for x in range(5)}
    found = []
    for index in range(len(images)):
        places = [
            (y, x, flipped)
            for (y, x), crop in crops.items()
            for flipped in (False, True)
            if torch.equal(moved[index], crop[index].flip(2) if flipped else crop[index])
        ]
        assert len(places) == 1, f"picture {index} is {len(places)} crops"
        found += places
    assert len({(y, x) for y, x, _ in found}) > 15  # of 25
    assert 15 < sum(flipped for _, _, flipped in found) < 49  # 32 expected, 4 standard deviations either way


def test_augmentation_follows_seed_and_step_alone():
    images = _random_images()
    make = _pictures(crop=2, flip=True, cutout=3, resized_crop=0.5)
    first = make.training(images, 7)
    torch.rand(10)
    assert torch.equal(first, _pictures(crop=2, flip=True, cutout=3, resized_crop=0.5).training(images, 7))
    assert not torch.equal(first, make.training(images, 8))
    assert not torch.equal(first, _pictures(seed=1, crop=2, flip=True, cutout=3, resized_crop=0.5).training(images, 7))


def test_without_augmentation_training_sees_what_testing_sees():
    images = _random_images()
    assert torch.equal(_pictures().training(images, 0), images.float())


def test_a_cut_out_is_a_square_of_its_size():
    shown = _pictures((1, 16, 16), channels=1, cutout=4).training(_random_images(200, (1, 16, 16)), 0)
    gone = shown.squeeze(1) == 0
    rows, columns = gone.any(2).sum(1), gone.any(1).sum(1)
    assert (gone.sum((1, 2)) == rows * columns).all()  # a rectangle
    assert rows.max() == columns.max() == 4 and rows.min() >= 1  # cut off by the border at the smallest
    assert (gone.sum((1, 2)) == 16).float().mean() > 0.4  # inside as a rule: (12/16)^2 = 0.56 expected


def test_a_resized_crop_shows_a_part_enlarged():
    ramp = torch.arange(64, dtype=torch.uint8).repeat(50, 1, 64, 1) * 3
    shown = _pictures((1, 64, 64), channels=1, resized_crop=0.25).training(ramp, 0)
    assert shown.amin() >= 0 and shown.amax() <= 189
    slopes = (shown[:, 0, 0, 40] - shown[:, 0, 0, 20]) / 20 / 3  # 1 for the whole width, 0.5 * 0.87 for the least
    assert slopes.min() > 0.25 / 1.16 and slopes.max() < 1.01 and slopes.std() > 0.05
    assert torch.allclose(shown[:, 0, 10], shown[:, 0, 50], atol=1e-3)  # columns stay columns


def test_pictures_are_normalised_and_grey_ones_repeated():
    images = _random_images(2, (1, 4, 4))
    make = Pictures(
        Augment(crop=0, flip=False, cutout=0, resized_crop=0.0), scale=((100.0,), (50.0,)), shape=(1, 4, 4), channels=3,
        device=CPU, channels_last=True, seed=0,
    )  # fmt: skip
    shown = make.testing(images)
    assert shown.shape == (2, 3, 4, 4) and shown.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(shown[:, 2], (images[:, 0].float() - 100) / 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"channels": 4}, "takes pictures of 4 channels, the data have 3"), ({"crop": 8}, "moves by 8 pixels, .* has 8")],
)
def test_pictures_that_do_not_fit_are_refused(options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        _pictures(**options)


def _numbers(count: int = 50) -> DataSet:
    table = Table(torch.arange(count), torch.arange(count))
    return DataSet("numbers", "text", table, table, count)


def test_an_epoch_has_every_sample_at_most_once_and_the_next_another_order():
    batches = Batches(_numbers(), batch=8, device=CPU, seed=3)
    assert batches.steps == 6
    epochs = [torch.cat([batches.training(step)[1] for step in range(epoch * 6, epoch * 6 + 6)]) for epoch in (0, 1)]
    for epoch in epochs:
        assert len(epoch.unique()) == len(epoch) == 48
    assert not torch.equal(*epochs)
    again = Batches(_numbers(), batch=8, device=CPU, seed=3)
    assert torch.equal(again.training(9)[1], epochs[1][24:32])  # begun in the middle
    assert not torch.equal(Batches(_numbers(), batch=8, device=CPU, seed=4).training(0)[1], epochs[0][:8])


def test_data_that_stay_on_the_host_come_in_the_same_order(monkeypatch: pytest.MonkeyPatch):
    here = Batches(_numbers(), batch=8, device=CPU, seed=3)
    monkeypatch.setattr(batches_module, "_fits", lambda data, device: False)
    there = Batches(_numbers(), batch=8, device=CPU, seed=3)
    try:
        for step in (0, 1, 2, 4, 5, 6, 7, 13):  # with jumps: what was gathered ahead is then of no use
            assert torch.equal(here.training(step)[1], there.training(step)[1])
    finally:
        there.close()


def test_the_test_split_comes_whole_and_in_order():
    parts = [targets for _, targets in Batches(_numbers(), batch=8, device=CPU, seed=3).testing()]
    assert torch.equal(torch.cat(parts), torch.arange(50)) and len(parts[-1]) == 2


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(UsageError, match="a batch of 64 does not fit into an epoch of 50 samples"):
        Batches(_numbers(), batch=64, device=CPU, seed=0)


def test_weights_decay_and_biases_do_not():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].weight.requires_grad_(False)
    sgd = make_optimizer(Optimizer(name="sgd", lr=0.1, weight_decay=0.01), model)
    assert [(group["weight_decay"], len(group["params"])) for group in sgd.param_groups] == [(0.01, 1), (0.0, 4)]
    assert sgd.defaults["nesterov"] and sgd.defaults["momentum"] == 0.9
    assert not make_optimizer(Optimizer(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0), model).defaults["nesterov"]
    assert isinstance(make_optimizer(Optimizer(name="adamw", lr=0.1, weight_decay=0.0), model), torch.optim.AdamW)
    assert isinstance(make_optimizer(Optimizer(name="lars", lr=5.0, weight_decay=0.0), model), LARS)


@pytest.mark.parametrize(
    ("name", "batch", "optimizer", "lr", "decay"),
    [("resnet18", 512, "sgd", 0.4, 5e-4), ("alexnet", 128, "sgd", 0.01, 5e-4), ("vit_ti_16", 64, "adamw", 1e-3, 0.05)],
)
def test_what_is_left_open_is_chosen(name: str, batch: int, optimizer: str, lr: float, decay: float):
    digits = data.load("digits", size=32)
    model = find_model(name, {"width": 48} if name.startswith("vit") else {"width": 8}, digits)
    config = Config.read({"train": {"batch": batch}})
    resolved = resolve(config, digits, model, zoo.build(name, **model.options))
    assert (resolved.optimizer.name, resolved.optimizer.weight_decay) == (optimizer, decay)
    assert resolved.optimizer.lr == pytest.approx(lr)
    assert resolved.schedule.warmup == 0.25 and resolved.augment.flip is False
    assert resolve(resolved, digits, model, nn.Linear(1, 1)) == resolved  # complete: nothing is chosen again
    mine = config.replace(optimizer={"name": "adamw", "lr": 0.5}, augment={"flip": True})
    resolved = resolve(mine, digits, model, nn.Linear(1, 1))
    assert (resolved.optimizer.name, resolved.optimizer.lr, resolved.augment.flip) == ("adamw", 0.5, True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fixde", {}, "unknown method 'fixde'; .*Did you mean 'fixed'"),
        ("fixed", {"linaer": 1}, "unknown option of method 'fixed' 'linaer'; .*check.*Did you mean 'linear'"),
        ("fixed", {"linear": -1}, "bound must be finite and greater than zero"),
        ("fixed", {"seed": 3}, "seed is set by the command itself"),
        ("plain", {"linear": 1}, "plain training has no options, got linear"),
        ("fixed", {"rules": "none.toml"}, "cannot read rule file none.toml"),
    ],
)
def test_methods_and_options_that_do_not_exist_are_refused(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_method(name, options)


def test_presets_are_the_method_they_stand_for():
    expected = {"linear": "1.0 std", "norm": "0.5 std", "log_probability": "0.1"}
    assert resolve_method("bold", {"norm": "0.5 std"}) == ("fixed", expected)
    assert resolve_method("exact", {"check": True, "min_size": None}) == ("exact", {"check": True})
