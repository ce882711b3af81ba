"""Small networks over sequences (4, 10, 16): attention, recurrence, lookup, indexing, Fourier transforms, casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from networks import Apply, parameter
from torch import Tensor, nn

WIDTH = 16
LENGTH = 10


def functional_transformer() -> nn.Module:
    """One qkv projection in three views, causal attention, dropout, layer norm, GELU: functional calls only."""

    def run(m: Apply, x: Tensor) -> Tensor:
        q, k, v = F.linear(F.layer_norm(x, (WIDTH,), m.scale), m.qkv).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=0.1)
        x = x + F.dropout(F.linear(mixed.transpose(1, 2).flatten(2), m.out), 0.1)
        return x + F.linear(F.relu(F.linear(F.rms_norm(x, (WIDTH,), m.scale), m.up)), m.down)

    weights = {"qkv": (48, 16), "out": (16, 16), "up": (32, 16), "down": (16, 32), "scale": (16,)}
    return Apply(run, **{name: parameter(*shape) for name, shape in weights.items()})


def handmade_attention() -> nn.Module:
    """Softmax attention with a mask written as masked_fill, and a dropout mask made by hand."""

    def run(m: Apply, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).split(WIDTH, dim=-1)
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(m.mask, float("-inf"))
        weights = scores.softmax(-1)
        keep = (torch.rand(weights.shape) > 0.2).to(weights.dtype) / 0.8
        return m.out((weights * keep) @ v)

    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return Apply(run, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH), mask=mask)


def multihead() -> nn.Module:
    """Weights asked for or not, with masks."""

    def run(m: Apply, x: Tensor) -> tuple[Tensor, ...]:
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        padding = torch.zeros(len(x), LENGTH, dtype=torch.bool)
        padding[:, -2:] = True
        y, weights = m.attention(x, x, x, key_padding_mask=padding)
        z, _ = m.attention(y, x, x, attn_mask=causal, need_weights=False)
        return y, weights, F.relu(z)

    return Apply(run, attention=nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True))


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    def run(m: Apply, x: Tensor) -> Tensor:
        y, _ = m.rnn(x)
        return F.relu(m.head(y))

    rnn = kind(WIDTH, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
    return Apply(run, rnn=rnn, head=nn.Linear(24, 5))


def cells() -> nn.Module:
    def run(m: Apply, x: Tensor) -> Tensor:
        hidden, state, gated = (x.new_zeros(len(x), WIDTH) for _ in range(3))
        for step in x.unbind(1):
            hidden, state = m.lstm(F.relu(step), (hidden, state))
            gated = m.gru(hidden, gated)
        return F.relu6(gated * 8)

    return Apply(run, lstm=nn.LSTMCell(WIDTH, WIDTH), gru=nn.GRUCell(WIDTH, WIDTH))


def lookups() -> nn.Module:
    """Embeddings (tied to the output), bags of them, and indexing of every kind."""

    def run(m: Apply, x: Tensor) -> list[Tensor]:
        tokens = (x[..., 0] * 3).long().remainder(20)
        e = F.relu(m.embedding(tokens))
        order = tokens.argsort(dim=1)
        e = e.gather(1, order.unsqueeze(-1).expand_as(e))
        bags = F.relu(m.bag(tokens))
        picked = e[:, [3, 1, 1]] + e.index_select(1, torch.tensor([0, 2, 2]))
        chosen = torch.where(e > 0.1, e, -e.detach()).masked_fill(e < -0.5, 0.0)
        largest = torch.cat([e.topk(2, dim=1).values, e.amax(1, keepdim=True), e.sort(1).values, e.cumsum(1)], 1)
        logits = F.linear(largest + F.pad(picked, (0, 0, 0, 20)), m.embedding.weight)
        added = e.scatter_add(1, order.unsqueeze(-1).expand_as(e), e)
        return [logits, bags, added, chosen.masked_select(tokens.unsqueeze(-1) > 4)]

    bag = nn.EmbeddingBag(20, WIDTH, mode="sum", sparse=False)
    return Apply(run, embedding=nn.Embedding(20, WIDTH), bag=bag)


def fourier() -> nn.Module:
    """A complex spectrum in the middle, filtered, split into parts, and back."""

    def run(m: Apply, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(m.first(x), dim=1)
        spectrum = spectrum * torch.view_as_complex(m.filter)
        magnitude = F.relu(spectrum.abs() - 0.1) * spectrum.real.tanh() * spectrum.imag
        return F.relu(m.last(torch.fft.irfft(spectrum, LENGTH, dim=1))[:, :6]) + magnitude

    return Apply(run, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, WIDTH), filter=parameter(6, WIDTH, 2))


def conjugate_parts() -> nn.Module:
    """z.imag and z.conj().imag are one memory, read with opposite signs: the second is a view with the negative bit."""

    def run(m: Apply, x: Tensor) -> Tensor:
        z = torch.fft.rfft(m.first(x), dim=1)
        y = m.second(x).tanh()[:, :6]
        return z.imag * y + z.conj().imag * (y * y)

    return Apply(run, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))


def lora(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Frozen weights, of which autocast makes casts that carry no graph, with low-rank updates that train."""

    def run(m: Apply, x: Tensor) -> Tensor:
        for base, down, up in zip(m.base, m.down, m.up, strict=True):
            x = F.relu(base(x.to(base.weight.dtype)).to(x.dtype) + up(down(x)))
        return x

    layers = {name: nn.ModuleList() for name in ("base", "down", "up")}
    for _ in range(2):
        layers["base"].append(nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False))
        layers["down"].append(nn.Linear(WIDTH, 4, bias=False))
        layers["up"].append(nn.Linear(4, WIDTH, bias=False))
    return Apply(run, **layers)


def shared() -> nn.Module:
    """One module called twice in a forward, and its weight used a third time, transposed."""

    def run(m: Apply, x: Tensor) -> Tensor:
        return F.linear(m.block(m.block(x) + x), m.block[0].weight.t())

    return Apply(run, block=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Dropout(0.1)))


def norms() -> nn.Module:
    def run(m: Apply, x: Tensor) -> Tensor:
        x = F.relu(m.layer(x) + m.rms(x))
        x = F.leaky_relu(m.group(x.transpose(1, 2)))
        return F.hardtanh(m.instance(x) + F.local_response_norm(x, 3) + F.normalize(x, dim=1))

    return Apply(
        run,
        layer=nn.LayerNorm(WIDTH),
        rms=nn.RMSNorm(WIDTH),
        group=nn.GroupNorm(4, WIDTH),
        instance=nn.InstanceNorm1d(WIDTH, affine=True),
    )


SEQUENCES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "functional transformer": (functional_transformer, {"bitmask"}),
    "handmade attention": (handmade_attention, {"bitmask"}),
    "MultiheadAttention": (multihead, {"bitmask"}),
    "TransformerEncoder, ReLU": (encoder, {"bitmask"}),
    "TransformerEncoder, GELU, norm first": (partial(encoder, activation="gelu", norm_first=True), {"bitmask"}),
    "LSTM": (partial(recurrent, nn.LSTM), {"bitmask"}),
    "GRU": (partial(recurrent, nn.GRU), {"bitmask"}),
    "LSTM and GRU cells": (cells, {"bitmask"}),
    "lookups and indexing": (lookups, {"bitmask"}),
    "Fourier transform": (fourier, {"bitmask"}),
    "conjugate views": (conjugate_parts, set()),
    "LoRA": (lora, {"bitmask"}),
    "LoRA on bf16 weights": (partial(lora, dtype=torch.bfloat16), {"bitmask"}),
    "shared module": (shared, {"bitmask"}),
    "normalisations": (norms, {"bitmask"}),
}
