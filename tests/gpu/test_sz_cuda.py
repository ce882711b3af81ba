"""The twin of ``sz`` on a device: the bytes of the codec there and on the CPU, on made-up and on real activations."""

from __future__ import annotations

import pytest
import torch
from sz_cases import DTYPES, Case, assert_same_payload, assert_same_values, check, make_cases
from torch import Tensor, nn

from lowtide import codecs, kernels
from lowtide.app import zoo
from lowtide.bounds import BoundRule
from lowtide.records import Bound, Kind, Need, Per

pytestmark = pytest.mark.gpu
# Every combination of options and layouts is a kernel to compile, a second each: spread over the dtypes, not repeated.
LEFT_OUT = {
    "fp32": ("row of one", "row of a sequence", "sample and channel, channels_last"),
    "fp16": ("row", "sample", "channel", "wide"),
    "bf16": ("row of one", "row:", "sample and channel:", "channel:", "wide"),
}
GIB_FOR_LARGE = 40


def _chosen(dtype: str) -> list[Case]:
    """For the short dtypes, payloads without a code for zero are left to subnormals."""
    cases = [case for case in make_cases(DTYPES[dtype]) if not str(case).startswith(LEFT_OUT[dtype])]
    cases = [case for case in cases if not (case.bound.axes and case.rounding == "nearest")]
    return [case for case in cases if dtype == "fp32" or case.keep_zeros or case.name == "subnormals"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_equals_codec_here_and_on_the_cpu(dtype: str) -> None:
    device = torch.device("cuda")
    assert torch.empty(1 << 20, device=device).isnan().all(), (
        "memory is not poisoned: unwritten elements would not show"
    )
    cases = _chosen(dtype)
    assert len(cases) > 15
    for case in cases:
        check(case, device, against_cpu=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_random_tensors(dtype: str) -> None:
    """Different values in every run: the seed is in the name of the case, which a failure shows."""
    seed = torch.seed() % (1 << 31)
    random = torch.Generator().manual_seed(seed)
    for size, scale in ((1 << 20, 1.0), (999_999, 30.0), (12_345, 1e-3)):
        x = (torch.randn(size, generator=random) * scale).to(DTYPES[dtype])
        bound = Bound.absolute(float(torch.rand((), generator=random)) * scale / 2 + 1e-6)
        check(Case(f"random, seed {seed}", x, bound, seed=seed), torch.device("cuda"), against_cpu=True)


@pytest.fixture(scope="module")
def activations() -> dict[str, Tensor]:
    """Outputs of convolutions, norms and ReLUs of a ResNet-18 on small pictures after some steps of training."""
    torch.manual_seed(0)
    entry = zoo.describe("resnet18")
    options = {"num_classes": 10, "stem": "cifar"}
    model = entry.build(**options).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs, target = entry.example(8, generator=generator, **options)
    for _ in range(5):
        optimizer.zero_grad()
        entry.loss(model(inputs), target).backward()
        optimizer.step()
    found: dict[str, Tensor] = {}
    wanted = {"bn1", "layer1.0.conv1", "layer1.1.relu", "layer2.0.bn2", "layer3.1.relu", "layer4.1.conv2"}

    def watch(name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _, args, output: found.__setitem__(name, output.detach().clone()))

    for name, module in model.named_modules():
        if name in wanted:
            watch(name, module)
    with torch.no_grad():
        model(inputs)
    assert found.keys() == wanted
    return found


@pytest.mark.parametrize("per", [Per.TENSOR, Per.CHANNEL], ids=lambda per: per.value)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_real_activations(activations: dict[str, Tensor], per: Per, dtype: str, layout: torch.memory_format) -> None:
    need = Need(Kind.VALUES, "", family="norm", per=per)
    for name, activation in activations.items():
        x = activation.to(DTYPES[dtype]).contiguous(memory_format=layout)
        bound = BoundRule.parse("0.4 std").resolve(x, need)
        payload = check(Case(name, x.cpu(), bound, keep_zeros="relu" in name), x.device, against_cpu=True)
        assert payload.nbytes < x.numel() * x.itemsize / 2, f"{name}: {payload.nbytes} of {x.numel()} values"


def test_more_elements_than_an_int32_counts() -> None:
    """And more bytes. Offsets into the words stay below, offsets into the values do not."""
    free, _ = torch.cuda.mem_get_info()
    if free < GIB_FOR_LARGE << 30:
        pytest.skip(f"needs {GIB_FOR_LARGE} GiB of free memory, there are {free >> 30}")
    torch.use_deterministic_algorithms(False)  # filling memory takes longer than the test
    count = (1 << 31) + 1025
    x = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    for part in x.split(1 << 28):
        part.normal_()
    x[-3:] = torch.tensor([torch.nan, 0.0, 1e30], device="cuda")
    codec = codecs.create("sz", keep_zeros=True)
    twin = kernels.twin(codec, x.device, x.dtype)
    bound = Bound.absolute(0.5)
    payload = twin.encode(x, bound, seed=3)
    assert_same_payload(payload, codec.encode(x, bound, seed=3), f"{count} values")
    decoded = twin.decode(payload)
    for start in range(0, count, 1 << 28):
        saved, seen = x[start : start + (1 << 28)], decoded[start : start + (1 << 28)]
        close = (seen.float() - saved.float()).abs() <= 0.5  # exact: differences of near bfloat16 values fit float32
        assert bool((close | (seen == saved) | (seen.isnan() & saved.isnan())).all()), f"from {start} on"
    assert torch.equal(decoded[-3:].view(torch.int16), x[-3:].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_writes_every_element(dtype: torch.dtype) -> None:
    """Into the very memory that held NaN before, as training finds it; the input has none."""
    torch.use_deterministic_algorithms(False)
    x = torch.randn(3_000_001, device="cuda").to(dtype)
    x[5::999] *= 1e6
    codec = codecs.create("sz", keep_zeros=True)
    twin = kernels.twin(codec, x.device, x.dtype)
    payload = twin.encode(x, Bound.absolute(0.1), seed=1)
    for read in ("decode", "nonzero"):
        expected = getattr(codec, read)(payload)
        torch.cuda.empty_cache()
        poison = torch.full_like(x, torch.nan)
        address = poison.data_ptr()
        del poison
        got = getattr(twin, read)(payload)
        assert got.data_ptr() == address, "the poisoned memory was not reused: the test is empty"
        assert not bool(got.isnan().any())
        assert_same_values(got, expected, read)
