"""Pairs for the kernels that fold and unfold while they code; and what is asked of them: the values of the way by way
of a folded tensor, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from fold_cases import LAST, make_norm
from same_payload import assert_same_values
from torch import Tensor

from lowtide.codecs.sz import Plan, Sz
from lowtide.coding import fold, rans_fit
from lowtide.kernels import _sz_jobs
from lowtide.kernels._fold import Folding
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.records import Bound, TensorSpec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SZ = Sz(coder="rans")
CPU = torch.device("cpu")
# Kind, shape, order in memory. Chunks are whole and not.
PLACES: dict[str, tuple[int, tuple[int, ...], torch.memory_format]] = {
    "runs": (_sz_jobs._MANY, (9, 6, 20, 25), torch.contiguous_format),
    "inner": (_sz_jobs._INNER, (9, 12, 20, 13), LAST),
    "fixed": (_sz_jobs._FIXED, (7, 16, 20, 13), LAST),
}
CASES = [
    (place, dtype, values)
    for place in PLACES
    for dtype in DTYPES
    for values in (1, 2, 3, 4)
    if (len(dtype) + values + len(place)) % 2 or dtype == "bf16"
]


def make_pair(place: str, dtype: torch.dtype, device: torch.device = CPU, *, odd: bool = False) -> Folding:
    """Scales of either sign; channels that are always on, never on, or without a scale; values that are none."""
    _, shape, order = PLACES[place]
    source = torch.Generator().manual_seed(5)
    channels = shape[1]
    x = (2 * torch.randn(shape, generator=source) + 3 * torch.randn(1, channels, 1, 1, generator=source)).to(dtype)
    x = x.contiguous(memory_format=order).to(device)
    weight, bias = torch.randn(2, channels, generator=source)
    bias[::4] *= 30
    weight[1] = 0
    norm, y = make_norm(x, weight.to(device), bias.to(device))
    spread = 1 / norm.inverse_std.double()
    made = Bound(torch.tensor(0.3, dtype=torch.float64, device=device))
    table = fold.table(norm, Bound(0.7 * spread, (1,)), made, dtype)
    if odd:  # in a chunk that is whole
        for at, value in ((3, torch.nan), (700, torch.inf), (701, -torch.inf), (1500, 3e4), (1501, -3e4)):
            x.as_strided((x.numel(),), (1,))[at] = value
    return Folding(x, y.contiguous(memory_format=order), table)


def plan_for(t: Tensor, values: int) -> Plan:
    bound = Bound(torch.full((), fold.limit(torch.bfloat16), dtype=torch.float64, device=t.device))
    grid = SZ.grid(t, bound)
    codes = SZ.survey(t, grid).cpu()
    sample = rans_fit.Sample(codes, False)
    plan = SZ.fit(grid, codes, t.numel(), False)
    model = sample.model(sample.alphabet(values, t.numel()))
    return replace(plan, model=replace(model, freqs=model.freqs.to(t.device)))


def check(pair: Folding, plan: Plan) -> Any:
    """Everything that must be equal, and that nothing was changed; gives the twin's payload."""
    t, before = pair.folded(), (pair.source.clone(), pair.made.clone())
    twin = SzCuda(SZ).folding(pair.source.dtype)
    encoding = _sz_jobs.encoding_of(SZ, TensorSpec.of(t), plan, twin.folds)
    assert encoding is not None and encoding.is_folded
    expected = SZ.decode(SZ.encode(t, seed=3, plan=plan))
    got = twin.encode(pair, seed=3, plan=plan)
    assert_same_values(SZ.decode(got), expected, "what the folded tensor comes back as", any_nan=True)
    for read, was in zip((pair.source, pair.made), before, strict=True):
        assert torch.equal(read.nan_to_num(0.5), was.nan_to_num(0.5)), "what was read was changed"
    check_unfolded(twin, got, expected, pair)
    return got


def check_unfolded(twin: SzCuda, encoded: Any, t: Tensor, pair: Folding) -> None:
    dtype, table = pair.source.dtype, pair.table
    drawn = torch.randn(t.shape, generator=torch.Generator().manual_seed(1))
    gradient = torch.empty_like(pair.made).copy_(drawn)
    source, made = fold.source(t, table, dtype), fold.made(t, table, dtype)
    parts = twin.unfold(encoded, table, dtype, made=True)
    assert parts is not None and parts[1] is None
    assert_same_values(parts[0], made, "what ReLU made", any_nan=True)
    for given in (None, gradient):
        parts = twin.unfold(encoded, table, dtype, gradient=given)
        assert parts is not None
        assert_same_values(parts[0], source, "the norm's input", any_nan=True)
    assert parts is not None and parts[1] is not None
    assert_same_values(parts[1], fold.gate(t, gradient), "what passes ReLU")
