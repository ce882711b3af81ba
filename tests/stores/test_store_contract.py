"""What holds for every store in the registry: a new file in ``lowtide.stores`` is tested here without an edit.

Stores that have something to do only on a GPU run here twice: as they are, and over a link whose copies come late.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from slow_link import SlowLink
from torch import Tensor, nn

import lowtide
from lowtide import codecs
from lowtide.records import Bound, Encoded
from lowtide.registry import STORES
from lowtide.stores import Held, Store, host

Make = Callable[[], Store]
PARTS = {
    "row": lambda: torch.randn(300),
    "bytes": lambda: torch.randint(0, 255, (1000,), dtype=torch.uint8),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(6, 7).t(),
    "flags": lambda: torch.rand(64) > 0.5,
    "half": lambda: torch.randn(33, dtype=torch.bfloat16),
    "scalar": lambda: torch.randn((), dtype=torch.float64),
    "empty": lambda: torch.empty(0, 3),
}


@pytest.fixture(params=[*STORES.names(), "host, slow link"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a store; with the slow link, one that sends even a byte and has room for next to nothing."""
    name = request.param
    if name != "host, slow link":
        yield lambda: STORES.create(name)
        return
    link = SlowLink(seed=0)
    monkeypatch.setattr(host, "link_to", lambda device: link)
    yield lambda: STORES.create("host", staging=4096, least=1)
    assert link.races == []


def payload(number: int = 0, parts: dict[str, Tensor] | None = None) -> Encoded:
    torch.manual_seed(number)
    tensors = {name: draw() for name, draw in PARTS.items()} if parts is None else parts
    whole = codecs.create("identity").encode(torch.zeros(2, 3))
    return Encoded("anything", 3, whole.spec, {"number": number}, tensors)


def assert_same_payload(got: Encoded, expected: Encoded) -> None:
    assert (got.codec, got.version, got.spec) == (expected.codec, expected.version, expected.spec)
    assert dict(got.meta) == dict(expected.meta)
    assert list(got.tensors) == list(expected.tensors)
    for name, part in expected.tensors.items():
        found = got.tensors[name]
        assert (found.dtype, found.shape, found.stride(), found.device) == (
            part.dtype,
            part.shape,
            part.stride(),
            part.device,
        )
        assert torch.equal(found, part), name


def test_a_payload_comes_back_as_it_was_and_as_often_as_it_is_asked_for(make: Make) -> None:
    held = make().put(payload())
    for _ in range(3):
        assert_same_payload(held.fetch(), payload())


def test_any_order_and_any_number_of_payloads(make: Make) -> None:
    store, order = make(), random.Random(1)
    held = {number: store.put(payload(number)) for number in range(40)}
    for turn in ([*range(39, -1, -1)], [*range(40)], [order.randrange(40) for _ in range(60)]):
        for number in turn:
            assert_same_payload(held[number].fetch(), payload(number))
    for number in range(0, 40, 3):
        del held[number]
    held |= {number: store.put(payload(number)) for number in range(40, 60)}
    for number in sorted(held, reverse=True):
        assert_same_payload(held[number].fetch(), payload(number))


@pytest.mark.parametrize("parts", [{}, {"none": torch.empty(0)}], ids=["no part", "an empty part"])
def test_a_payload_of_nothing(make: Make, parts: dict[str, Tensor]) -> None:
    held = make().put(payload(5, parts))
    assert held.nbytes == 0
    assert_same_payload(held.fetch(), payload(5, parts))


def test_nbytes_is_what_stays_on_the_device_and_never_more_than_the_payload(make: Make) -> None:
    held = make().put(payload())
    assert 0 <= held.nbytes <= payload().nbytes


def test_dropping_a_payload_frees_it(make: Make) -> None:
    """Fetched, never fetched, and in the middle of others."""
    store = make()
    held, parts = [], []
    for number in range(12):
        encoded = payload(number)
        parts += [weakref.ref(part.untyped_storage()) for part in encoded.tensors.values() if part.numel()]
        held.append(store.put(encoded))
        del encoded
    fetched = held[5].fetch()
    parts += [weakref.ref(part.untyped_storage()) for part in fetched.tensors.values() if part.numel()]
    assert_same_payload(fetched, payload(5))
    del fetched
    del held[3:7]
    held.clear()
    alive = [ref for ref in parts if ref() is not None]
    assert not alive, f"{len(alive)} of {len(parts)} storages are still there"


def test_a_fetched_payload_outlives_what_held_it(make: Make) -> None:
    store = make()
    held = [store.put(payload(number)) for number in range(8)]
    fetched = [item.fetch() for item in reversed(held)]
    held.clear()
    for number, got in zip(range(7, -1, -1), fetched, strict=True):
        assert_same_payload(got, payload(number))


def test_threads_may_put_fetch_and_drop_at_the_same_time(make: Make) -> None:
    store, failures = make(), []

    def work(first: int) -> None:
        try:
            for turn in range(5):
                held: list[Held] = [store.put(payloads[first + number]) for number in range(4)]
                for number in (3, 2, 0, 1, 2):
                    assert_same_payload(held[number].fetch(), payloads[first + number])
                held[turn % 4].fetch()
        except BaseException as error:
            failures.append(error)

    payloads = [payload(number) for number in range(16)]
    threads = [threading.Thread(target=work, args=(4 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("codec", ["identity", "sz", "groups", "bitmask"])
def test_payloads_of_codecs_decode_as_without_the_store(make: Make, codec: str) -> None:
    options = {"test": "gt", "params": (0.0,)} if codec == "bitmask" else {}
    coder = codecs.create(codec, **options)
    x = torch.randn(4, 8, 10, 10).to(memory_format=torch.channels_last)
    bound = Bound.absolute(0.1) if coder.takes_bound else None
    encoded = coder.encode(x, bound, seed=3)
    expected = coder.decode(encoded)
    versions = [part._version for part in encoded.tensors.values()]
    held = make().put(encoded)
    assert [part._version for part in encoded.tensors.values()] == versions, "a store changes nothing"
    del encoded
    decoded = coder.decode(held.fetch())
    assert torch.equal(decoded, expected) and decoded.stride() == x.stride()


def test_training_gives_the_same_weights_with_every_store(make: Make) -> None:
    def train(store: Store) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        session = lowtide.attach(model, "fixed", optimizer=optimizer, store=store, min_size=64, check=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 4, 12, 12)).square().mean().backward()
            optimizer.step()
        assert session.ledger.held == 0
        return [parameter.detach() for parameter in model.parameters()]

    expected = train(STORES.create("device"))
    for plain, other in zip(expected, train(make()), strict=True):
        assert torch.equal(plain, other)
