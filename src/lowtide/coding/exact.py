"""Values that a chunk carries bit for bit: escapes with their positions, and chunks that are their raw values.

An escape is its position in the chunk and the bits of the value: one word (position << 16 | bits) for values of 16
bits, else the position and then one word for every 32 bits of the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.errors import PayloadError


def escape_words(dtype: torch.dtype) -> int:
    return 1 if dtype.itemsize == 2 else 1 + dtype.itemsize // 4


def raw_words(dtype: torch.dtype, count: int) -> int:
    """Words of ``count`` values as they are."""
    return -(-count * dtype.itemsize // 4)


def raw_counts(dtype: torch.dtype, count: int, chunk: int, device: torch.device) -> Tensor:
    """Words of every chunk if it were raw; the last chunk may be short."""
    chunks = -(-count // chunk)
    counts = torch.full((chunks,), raw_words(dtype, chunk), device=device)
    if chunks:
        counts[-1] = raw_words(dtype, count - (chunks - 1) * chunk)
    return counts


def write_escapes(words: Tensor, at: Tensor, lost: Tensor, values: Tensor, chunk: int) -> None:
    """The elements that are ``lost``, in order of position, from word ``at`` of their chunk on."""
    index = lost.nonzero().squeeze(1)
    if not index.numel():
        return
    owner, position = index // chunk, (index % chunk).to(torch.int32)
    at = at[owner] + ranks(lost.view(-1, chunk).sum(1)) * escape_words(values.dtype)
    bits = values[index].view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)
    if values.dtype.itemsize == 2:
        words[at] = position << 16 | bits.to(torch.int32) & 0xFFFF
        return
    words[at] = position
    for word, part in enumerate(bits.view(index.numel(), -1).unbind(1)):
        words[at + 1 + word] = part


def read_escapes(words: Tensor, at: Tensor, counts: Tensor, flat: Tensor, chunk: int) -> None:
    """Put ``counts`` escapes of each chunk, from word ``at`` on, into the decoded values.

    As integers: writing floats by index may pass them through another float type, which not every NaN survives.
    """
    owner = torch.arange(counts.numel(), device=flat.device).repeat_interleave(counts)
    if not owner.numel():
        return
    at = at[owner] + ranks(counts) * escape_words(flat.dtype)
    if flat.dtype.itemsize == 2:
        word = words[at]
        position, value = (word >> 16).long() & 0xFFFF, (word & 0xFFFF).to(torch.int16)
    else:
        bits = torch.int64 if flat.dtype.itemsize == 8 else torch.int32
        parts = [words[at + 1 + word] for word in range(flat.dtype.itemsize // 4)]
        position, value = words[at].long() & 0xFFFFFFFF, torch.stack(parts, 1).view(bits).flatten()
    flat.view(value.dtype)[places(owner, position, flat.numel(), chunk)] = value


def places(owner: Tensor, position: Tensor, count: int, chunk: int) -> Tensor:
    """Elements at ``position`` of their chunks; refuses what lies outside."""
    if int(position.amax()) >= chunk or int((owner * chunk + position).amax()) >= count:
        raise PayloadError("an escape lies outside its chunk: the payload is corrupted")
    return owner * chunk + position


def write_raw(words: Tensor, base: Tensor, counts: Tensor, raw: Tensor, values: Tensor, chunk: int) -> None:
    """The chunks that are ``raw``, from word ``base`` on; ``values`` is filled up to whole chunks."""
    index = raw.nonzero().squeeze(1)
    if index.numel():
        span = torch.arange(raw_words(values.dtype, chunk), device=values.device)
        used = span < counts[index].unsqueeze(1)
        bits = values.view(-1, chunk)[index].contiguous().view(torch.int32)
        words[(base[index].unsqueeze(1) + span)[used]] = bits[used]


def read_raw(words: Tensor, base: Tensor, raw: Tensor, flat: Tensor, chunk: int) -> None:
    for index in raw.nonzero().flatten().tolist():
        part = flat[index * chunk : (index + 1) * chunk]
        start = int(base[index])
        stored = words[start : start + raw_words(flat.dtype, part.numel())]
        part.copy_(stored.clone().view(flat.dtype)[: part.numel()])


def ranks(counts: Tensor) -> Tensor:
    """0, 1, 2, ... within each run of the given lengths."""
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.arange(starts.numel(), device=counts.device) - starts
