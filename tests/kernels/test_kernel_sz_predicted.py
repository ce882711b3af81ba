"""Differences along rows in place of codes (sz_predict.cuh), under the emulator: the same values, whatever they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from same_payload import assert_same_values
from simt import requires_compiler
from test_kernel_sz_cuda import BF16, LARGEST, PREDICTED, Instance, check, guarded, raw_chunks, tensors  # noqa: F401

from lowtide.codecs.sz import Sz
from lowtide.coding import rans, rans_fit
from lowtide.kernels import _sz_jobs
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.records import Bound, TensorSpec


@requires_compiler
@pytest.mark.parametrize("instance", PREDICTED, ids=str)
def test_values_do_not_depend_on_prediction(instance: Instance) -> None:
    """Bit for bit, whatever lies between: NaN, infinities, codes without a digit. Most chunks are coded."""
    least = {1: 0.4, 2: 0.8, 3: 1.5, 4: 2.5}[instance.values] * (2 if instance.rounding == "stochastic" else 1)
    raw = chunks = 0
    for number, (x, bound) in enumerate(tensors(instance)):
        bound, values = Bound(bound.value.nan_to_num(least).clamp(min=least), bound.axes), []
        check(x, instance.codec, instance.plan(x, bound), seed=number)
        for one in (instance, replace(instance, predicted=False)):
            twin, plan = SzCuda(one.codec), one.plan(x, bound)
            encoded = twin.encode(x, seed=number, plan=plan)
            assert encoded.meta["alphabet"].get("predicted", False) == one.predicted
            raw, chunks = raw + len(raw_chunks(encoded)), chunks + encoded.tensors["heads"].numel() // 3
            values.append(twin.decode(encoded))
        assert_same_values(*values, str(instance))
    assert raw < chunks / 2


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("values", LARGEST)
def test_the_largest_sums_of_a_row(values: int) -> None:
    """Of 128 differences that are all as large as they get; and of all others, some of which wrap around."""
    size = LARGEST[values]
    alphabet = rans.Alphabet(values, size, -size // 2, False, size - 1, 12, predicted=True)
    freqs = torch.tensor(rans_fit.normalise([1 / alphabet.symbols] * alphabet.symbols, 0, every=True))
    codec, count = Sz(coder="rans", rounding="nearest"), 4 * alphabet.chunk
    falling = (-2 - torch.arange(rans.ROW)).repeat(count // 2 // rans.ROW)
    digits = torch.cat([falling, torch.randint(0, size, (count // 2,))]) % size
    differences = alphabet.differences(digits)
    assert bool((differences[: count // 2] == size - 1).all()) and len(differences.unique()) == size
    bound = Bound.absolute(0.5)
    x = (digits + alphabet.low) * codec.step(bound, TensorSpec.of(torch.empty(count)))
    plan = replace(codec.plan(x, bound, False), model=rans.Model(alphabet, freqs.short(), 8.0))
    got = check(x, codec, plan)
    assert not raw_chunks(got) and not bool(got.tensors["heads"][2::3].any()), "all are coded"
    assert torch.equal(
        SzCuda(codec).decode(got), codec.grid(x, bound).value(digits + alphabet.low, range(count), got.spec, 3)
    )


def test_pairs_are_not_predicted() -> None:
    """Neither by the plan of a twin that folds them, nor by kernels that fold what was planned elsewhere."""
    x = torch.randn(40, 96).cumsum(1)[:, :, None].expand(40, 96, 16).contiguous()
    codec, bound = Sz(coder="rans", predict="row"), Bound.absolute(0.5)
    plans = [twin.plan(x, bound) for twin in (SzCuda(codec), SzCuda(codec).folding(BF16))]
    assert [plan.model.alphabet.predicted for plan in plans] == [True, False]
    spec, meta = TensorSpec.of(x), {"zero_code": False, "rounding": "dither", "axes": (), "kind": "rans"}
    for plan in plans:
        alphabet = plan.model.alphabet
        encoding = _sz_jobs.encoding_of(codec, spec, plan, BF16)
        unfolding = _sz_jobs.unfolding_of(spec, {**meta, "alphabet": alphabet.meta()}, BF16)
        assert encoding.is_folded == (unfolding is not None) == (not alphabet.predicted)
