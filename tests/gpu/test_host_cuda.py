"""The store ``host`` on a device: copies that are held up on purpose, the staging bound, training bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from no_waiting import no_waiting
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo
from lowtide.records import Encoded, TensorSpec
from lowtide.stores._lane import Lane
from lowtide.stores._link import CudaLink
from lowtide.stores.host import Host

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")]
MIB = 1 << 20
HOLD_UP = 200_000_000  # cycles, about a tenth of a second: longer than all that is queued behind


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.use_deterministic_algorithms(False)  # it fills what torch.empty gives, which hides what these tests look for
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield


def payload(number: int, nbytes: int = MIB) -> Encoded:
    words = torch.full((nbytes // 8,), number, dtype=torch.int64, device="cuda")
    return Encoded("anything", 1, TensorSpec.of(words), {}, {"words": words})


def is_right(encoded: Encoded, number: int) -> bool:
    return bool((encoded.tensors["words"] == number).all())


def lane_of(store: Host) -> Lane:
    lane = store._lanes[torch.device("cuda", torch.cuda.current_device())]
    assert lane is not None
    return lane


def link_of(store: Host) -> CudaLink:
    link = lane_of(store).link
    assert isinstance(link, CudaLink)
    return link


def hold_up(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HOLD_UP)


def scribble(nbytes: int = MIB, times: int = 32) -> None:
    """Write over whatever memory of this size the allocator has to give away."""
    rooms = [torch.empty(nbytes // 8, dtype=torch.int64, device="cuda") for _ in range(times)]
    for room in rooms:
        room.fill_(-1)


@pytest.mark.parametrize("staging", [MIB, 4 * MIB, 64 * MIB])
def test_memory_is_not_used_again_while_it_is_being_copied_out(staging: int) -> None:
    store = Host(staging, keep=0)
    store.put(payload(0))
    hold_up(link_of(store).out.stream)
    held = []
    with no_waiting(is_idle=False):
        for number in range(12):
            held.append(store.put(payload(number)))
            scribble()
    for number in range(11, -1, -1):
        assert is_right(held[number].fetch(), number), number


def test_a_payload_that_dies_while_it_is_copied_out_takes_its_memory_along_safely() -> None:
    """Its memory on the device goes to whoever asks next, which has to wait for the copy that still reads it."""
    store = Host(64 * MIB, keep=0)
    kept = store.put(payload(1))
    copies = []
    for number in range(8):
        hold_up(link_of(store).out.stream)
        dying = store.put(payload(number))
        copies.append(dying.cargo.copies)  # type: ignore[attr-defined]
        del dying
        scribble()
    torch.cuda.synchronize()
    for number, copy in enumerate(copies):
        words = copy.rows[0]
        assert bool((words == number).all()), f"{int((words == -1).sum())} words of payload {number} are another's"
    assert is_right(kept.fetch(), 1)


def test_host_memory_of_a_payload_that_died_is_written_again_in_the_order_of_the_copies() -> None:
    store = Host(64 * MIB, keep=0)
    kept = store.put(payload(1))
    hold_up(link_of(store).out.stream)
    dying = store.put(payload(-1))
    at = dying.cargo.copies.rows[0].data_ptr()  # type: ignore[attr-defined]
    del dying
    later = store.put(payload(2))
    assert later.cargo.copies.rows[0].data_ptr() == at  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    assert bool((later.cargo.copies.rows[0] == 2).all())  # type: ignore[attr-defined]
    assert is_right(later.fetch(), 2) and is_right(kept.fetch(), 1)


def test_host_memory_is_not_written_again_while_it_is_read_for_another_stream() -> None:
    """The stream that puts the next payload has not waited for the copy that still brings the last one back."""
    store = Host(MIB, keep=0)
    first = store.put(payload(1))
    pushing = store.put(payload(2))
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    hold_up(link_of(store).back.stream)
    with torch.cuda.stream(other):
        total = first.fetch().tensors["words"].sum()
    at = first.cargo.copies.rows[0].data_ptr()  # type: ignore[attr-defined]
    del first
    later = store.put(payload(3))
    assert later.cargo.copies.rows[0].data_ptr() == at  # type: ignore[attr-defined]
    other.synchronize()
    assert int(total) == MIB // 8
    assert is_right(later.fetch(), 3) and is_right(pushing.fetch(), 2)


def test_what_stays_does_not_cross_and_is_given_back_as_it_was_put() -> None:
    store = Host(8 * MIB, keep=4 * MIB)
    encoded = [payload(number) for number in range(12)]
    held = [store.put(item) for item in encoded]
    assert [item.cargo.copies is None for item in held] == [False] * 8 + [True] * 4  # type: ignore[attr-defined]
    assert all(held[number].fetch() is encoded[number] for number in range(11, 3, -1))
    encoded.clear()
    for number in range(11, -1, -1):
        assert is_right(held[number].fetch(), number)
        scribble(times=4)


def test_backward_does_not_read_what_has_not_arrived_nor_write_where_it_is_still_read() -> None:
    store = Host(3 * MIB)
    held = [store.put(payload(number)) for number in range(12)]
    torch.cuda.synchronize()
    results = []
    with no_waiting(is_idle=False):
        for number in range(11, -1, -1):
            hold_up(link_of(store).back.stream)
            results.append((number, held[number].fetch().tensors["words"].sum()))
            scribble(times=4)
    for number, total in results:
        assert int(total) == number * (MIB // 8), number


def test_another_stream_and_another_thread_may_ask() -> None:
    store = Host(3 * MIB)
    held = [store.put(payload(number)) for number in range(12)]
    failures: list[int] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(11, -1, -1):
                torch.cuda._sleep(HOLD_UP // 20)
                if not is_right(held[number].fetch(), number):
                    failures.append(number)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(11, -1, -1):
        if not is_right(held[number].fetch(), number):
            failures.append(number)
        scribble(times=4)
    for thread in threads:
        thread.join()
    assert not failures


def test_what_is_on_the_device_stays_within_the_staging() -> None:
    store = Host(8 * MIB)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = [store.put(payload(number, 4 * MIB)) for number in range(40)]
    assert torch.cuda.max_memory_allocated() - before <= 13 * MIB, "the bound, and the payload that is being put"
    torch.cuda.reset_peak_memory_stats()
    for number in range(39, -1, -1):
        assert held[number].nbytes == 0
        encoded = held[number].fetch()
        del encoded
    assert torch.cuda.max_memory_allocated() - before <= 13 * MIB
    held.clear()
    assert torch.cuda.memory_allocated() == before, "a graph that is dropped leaves nothing"


def test_payloads_keep_their_strides_and_are_in_pinned_memory() -> None:
    parts = {
        "channels_last": torch.randn(4, 8, 6, 6, device="cuda").to(memory_format=torch.channels_last),
        "transposed": torch.randn(64, 32, device="cuda", dtype=torch.bfloat16).t(),
        "flags": torch.rand(1000, device="cuda") > 0.5,
        "scalar": torch.tensor(3.0, device="cuda"),
    }
    store = Host(least=1, staging=1)
    expected = {name: part.clone() for name, part in parts.items()}
    strides = {name: part.stride() for name, part in parts.items()}
    held = store.put(Encoded("anything", 1, TensorSpec.of(parts["flags"]), {}, dict(parts)))
    parts.clear()
    other = store.put(payload(0))
    assert all(row.is_pinned() for row in held.cargo.copies.rows)  # type: ignore[attr-defined]
    for name, part in held.fetch().tensors.items():
        assert part.stride() == strides[name] and part.is_cuda
        assert torch.equal(part, expected[name])
    assert is_right(other.fetch(), 0)


class Training:
    """A zoo model on the device, repeated bit for bit from run to run."""

    def __init__(self, name: str, bf16: bool) -> None:
        self._entry, self._bf16 = zoo.describe(name), bf16
        torch.manual_seed(0)
        self.model: nn.Module = self._entry.build(**self._entry.tiny).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def run(self, steps: int = 4) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(1)
        for _ in range(steps):
            inputs, target = self._entry.example(8, generator=generator, **self._entry.tiny)
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=self._bf16):
                output = self.model(inputs)
            self._entry.loss(output.float(), target).backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["resnet18", "gpt2_small", "unet"])
def test_offload_is_bit_equal_to_plain_training(name: str, bf16: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected, again = Training(name, bf16).run(), Training(name, bf16).run()
    if not all(torch.equal(*pair) for pair in zip(expected, again, strict=True)):
        pytest.skip("plain training does not repeat itself here")
    training = Training(name, bf16)
    options = {"staging": "256KiB", "least": 1, "min_size": 64}
    session = lowtide.attach(training.model, "offload", optimizer=training.optimizer, **options)
    got = training.run()
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    assert session.ledger.held == 0 and session.ledger.raw_peak > 2 * session.ledger.held_peak


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_compressed_payloads_may_wait_on_the_host(bf16: bool) -> None:
    """The same bounds, seeds and values as with payloads on the device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    results = []
    for store in ("device", Host(staging="64KiB", least=1)):
        training = Training("resnet18", bf16)
        lowtide.attach(training.model, "fixed", optimizer=training.optimizer, store=store, check=True, min_size=64)
        results.append(training.run())
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
