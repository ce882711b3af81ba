"""Tensors to code: drawn, and taken from a net in training."""

from __future__ import annotations

import pytest
import torch

from lowtide.app.bench import sources
from lowtide.app.bench.sources import Net
from lowtide.app.shared.workload import find_workload

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sources.NAMES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_drawn_tensors(name, dtype, channels_last):
    nbytes = 3 * 64 * 56 * 56 * 4
    make = sources.draw(name, dtype, CPU, nbytes=nbytes, seed=0, channels_last=channels_last).make
    x = make()
    assert x.dtype == dtype and x.shape == (3 * 4 // dtype.itemsize, 64, 56, 56)
    assert x.is_contiguous() != channels_last
    assert torch.equal(x, make())
    if name == "relu":
        # About half of 602112 values; a standard deviation is 0.0006 of them.
        assert bool((x >= 0).all()) and float((x == 0).float().mean()) == pytest.approx(0.5, abs=0.005)
    else:
        spread = x.float().std((0, 2, 3))
        assert float(spread.max() / spread.min()) > 5


def test_a_small_tensor_has_a_small_plane():
    x = sources.draw("relu", torch.float32, CPU, nbytes=64 * 4 * 9, seed=0, channels_last=False).make()
    assert x.shape == (1, 64, 3, 3)
    assert sources.draw("norm", torch.float32, CPU, nbytes=1, seed=0, channels_last=False).make().shape == (1, 64, 1, 1)


@pytest.fixture
def make_net():
    def make(model="resnet18", dtype=torch.float32, *, steps=1):
        load = find_workload(model, {}, tiny=True)
        return Net(load, dtype, CPU, batch=2, steps=steps, seed=0, channels_last=False)

    return make


def test_layers_are_the_largest_one_of_each_shape(make_net):
    net = make_net()
    found = {name: [item.origin for item in net.sources(name, layers=3, nbytes=1)] for name in sources.NAMES}
    # conv1 reads the picture; layer1.0.conv1 and three more read ReLU outputs of 8 x 32 x 32.
    assert found["relu"] == [
        "resnet18:layer1.0.conv1",
        "resnet18:layer2.0.conv2",
        "resnet18:layer3.0.conv2",
    ]
    assert found["norm"] == ["resnet18:bn1", "resnet18:layer2.0.bn1", "resnet18:layer3.0.bn1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_tensors_come_from_new_inputs_in_the_layout_of_the_net(make_net, dtype):
    net = make_net(dtype=dtype)
    (source,) = net.sources("relu", layers=1, nbytes=5 * 8 * 32 * 32 * dtype.itemsize)
    x = source.make()
    assert x.shape == (5, 8, 32, 32) and x.dtype == dtype
    assert x.is_contiguous() == (dtype == torch.float32)
    assert bool((x >= 0).all()) and 0.1 < float((x == 0).float().mean()) < 0.9
    assert all(not torch.equal(x[i], x[j]) for i in range(5) for j in range(i))


def test_real_tensors_are_of_the_trained_net(make_net):
    before, after = (next(make_net(steps=steps).sources("norm", layers=1, nbytes=8192)).make() for steps in (0, 2))
    assert before.shape == after.shape and not torch.equal(before, after)


def test_real_activations_from_the_command_line(bench_codec, read_rows):
    real = ("--real", "resnet18", "--tiny", "--batch", "2", "--steps", "1", "--layers", "1", "--bytes", "32K")
    assert bench_codec(*real, "--sources", "relu,norm") == 0
    assert [row["origin"] for row in read_rows()] == ["resnet18:layer1.0.conv1", "resnet18:bn1"]
