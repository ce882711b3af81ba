"""The coder ``rans``: range asymmetric numeral systems, 32 interleaved lanes a chunk, several values a symbol.

Symbols. With an alphabet of A digits, digit 0 is "exactly zero" if zero has a code of its own, and the others are the
codes low, low + 1, ... V digits make a symbol: the sum of digit_k * A**k, below 256. ``freqs`` gives every symbol its
share of 4096 (0: the symbol is not used). A code outside the alphabet is an escape, and so are all values of a symbol
that is not used; in their places the stream holds the digit ``fill``.

Prediction. In a ``predicted`` alphabet, which has no digit for zero, the stream holds differences in the places of
digits: of each digit and the one before it, modulo A; before the first of every row of 128 values comes ``fill``, the
most common one, so that the difference is small there, too. Escapes take part as ``fill``. Every symbol has a share
then: one that is replaced by another would change all values behind it.

Format. A chunk is ``rows`` rows of 128 values and decodes on its own. Lane l takes the values 4 l .. 4 l + 3 of row
after row, V at a time. A lane's state s is in [2**15, 2**31). Decoding a symbol: slot = s % 4096 names the symbol,
whose slots are c .. c + f - 1; s becomes f * (s // 4096) + slot - c; if s is then below 2**15 it becomes s << 16 | the
next word of the stream. All lanes share one stream of 16-bit words, read from its end: in each round the lanes that
need a word take theirs in the order of the lanes, the last lane's nearest to the end. The encoder runs backwards from
states of 2**15. A chunk is a run of 32-bit words: the 32 states that decoding starts from, the stream (two words in
one, the first in the low half), then its escapes. Codes come first (position << 16 | code & 0xFFFF), then values that
no code carries (``lowtide.coding.exact``), each kind in any order. "Exactly zero" as an escaped code is 4096. A chunk
that would not be smaller than raw values is raw: the values that it would come back as. ``heads`` has three numbers a
chunk: its first word; the length of its stream, or -1 if it is raw; and how many escapes of the one kind and, times
65536, of the other. Chunks lie one behind the other, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.coding import exact
from lowtide.errors import PayloadError

LANES = 32
ROW = 4 * LANES
SCALE = 4096
_LOW = 1 << 15
ZERO_CODE = 4096


@dataclass(frozen=True, slots=True)
class Alphabet:
    """``values`` digits a symbol, each below ``size``; the code of the first digit; whether digit 0 means zero."""

    values: int
    size: int
    low: int
    zero: bool
    fill: int
    rows: int
    predicted: bool = False

    def __post_init__(self) -> None:
        fits = 1 <= self.values <= 4 and self.size >= 2 and self.symbols <= 256 and 0 <= self.fill < self.size
        fits = fits and not (self.predicted and self.zero)
        if not fits or not 0 < self.rows <= 512 or self.rows % (3 if self.values == 3 else 4):
            raise PayloadError(f"no alphabet of rans: {asdict(self)}")

    @property
    def symbols(self) -> int:
        return int(self.size**self.values)

    @property
    def chunk(self) -> int:
        return self.rows * ROW

    @property
    def fill_symbol(self) -> int:
        return sum(self.fill * self.size**k for k in range(self.values))

    def digits(self, q: Tensor, zero: Tensor | None) -> Tensor:
        """The digit of every code, -1 for a code outside the alphabet."""
        codes = self.size - self.zero
        digit = q - self.low
        digit = (digit + int(self.zero) + 1) * ((digit >= 0) & (digit < codes)) - 1
        return digit if zero is None else digit * ~zero

    def symbols_of(self, digits: Tensor) -> Tensor:
        """(..., values) digits into one number each."""
        weights = torch.tensor([self.size**k for k in range(self.values)], device=digits.device)
        return (digits * weights).sum(-1)

    def differences(self, digits: Tensor) -> Tensor:
        """Digits of whole rows as the stream of a ``predicted`` alphabet has them."""
        rows = digits.view(-1, ROW)
        return (rows.diff(dim=1, prepend=rows.new_full((len(rows), 1), self.fill)) % self.size).flatten()

    def sums(self, differences: Tensor) -> Tensor:
        """The inverse of ``differences``."""
        return ((differences.view(-1, ROW).cumsum(1) + self.fill) % self.size).flatten()

    def meta(self) -> dict[str, Any]:
        """Without ``predicted`` where it is not: payloads are as they were before there was such a thing."""
        return {name: value for name, value in asdict(self).items() if name != "predicted" or value}


@dataclass(frozen=True, slots=True)
class Model:
    """An alphabet and the share of each of its symbols (int16, on the device that codes)."""

    alphabet: Alphabet
    freqs: Tensor
    bits: float  # a value, as estimated from the sample that the model was made from


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write(
    q: Tensor,
    zero: Tensor | None,
    lost: Tensor,
    values: Tensor,
    model: Model,
    restored: Callable[[], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The payload parts of codes (int32), of which ``zero`` ones stand for zero and ``lost`` ones for no value.

    ``values`` are what codes were made of, and are stored where they are lost. ``restored()`` is what codes come back
    as, for raw chunks to hold: whether a chunk is raw depends on the model, and what comes back must not.
    """
    alphabet, count, device = model.alphabet, values.numel(), values.device
    chunk = alphabet.chunk
    missing = -count % chunk
    digits = alphabet.digits(q, zero)
    outside = torch.cat([(digits < 0) & ~lost, lost.new_zeros(missing)])
    lost = torch.cat([lost, lost.new_zeros(missing)])
    q = torch.cat([q if zero is None else torch.where(zero, ZERO_CODE, q), q.new_zeros(missing)])
    digits = torch.cat([digits, digits.new_full((missing,), alphabet.fill)])
    values = torch.cat([values, values.new_zeros(missing)])
    digits = torch.where(outside | lost, alphabet.fill, digits)
    present = torch.arange(digits.numel(), device=device) < count

    freqs = model.freqs.long()
    assert not alphabet.predicted or bool((freqs > 0).all()), "differences that have no symbol break off a row"
    digits = alphabet.differences(digits) if alphabet.predicted else digits
    symbols = alphabet.symbols_of(_lanes(digits, alphabet))
    unused = freqs[symbols] == 0
    symbols = torch.where(unused, alphabet.fill_symbol, symbols)
    outside |= _memory(unused.unsqueeze(-1).expand(*unused.shape, alphabet.values), alphabet) & present & ~lost
    states, stream, lengths = _encode(symbols, freqs)

    codes_in, lost_in = outside.view(-1, chunk).sum(1), lost.view(-1, chunk).sum(1)
    after_stream = LANES + (lengths + 1) // 2
    counts = after_stream + codes_in + lost_in * exact.escape_words(values.dtype)
    as_raw = exact.raw_counts(values.dtype, count, chunk, device)
    raw = counts >= as_raw
    counts = torch.where(raw, as_raw, counts)
    base = counts.cumsum(0) - counts
    words = torch.zeros(int(counts.sum()), dtype=torch.int32, device=device)
    coded = (~raw).nonzero().squeeze(1)
    words[base[coded].unsqueeze(1) + torch.arange(LANES, device=device)] = _signed(states[coded])
    pairs = stream[coded].view(coded.numel(), stream.shape[1] // 2, 2)
    pairs = _signed(pairs[:, :, 0] | pairs[:, :, 1] << 16)
    place = torch.arange(pairs.shape[1], device=device)
    used = place < ((lengths[coded] + 1) // 2).unsqueeze(1)
    words[((base[coded] + LANES).unsqueeze(1) + place)[used]] = pairs[used]
    inside = ~raw.repeat_interleave(chunk)
    index = (outside & inside).nonzero().squeeze(1)
    owner = index // chunk
    rank = exact.ranks((outside & inside).view(-1, chunk).sum(1))
    words[base[owner] + after_stream[owner] + rank] = ((index % chunk) << 16 | q[index] & 0xFFFF).to(torch.int32)
    exact.write_escapes(words, base + after_stream + codes_in, lost & inside, values, chunk)
    if bool(raw.any()):
        filled = values if restored is None else torch.cat([restored(), values.new_zeros(missing)])
        bits = _BITS[values.dtype.itemsize]  # as integers: not every NaN survives a selection of floats
        kept = torch.where(lost, values.view(bits), filled.view(bits)).view(values.dtype)
        exact.write_raw(words, base, counts, raw, kept, chunk)
    escapes = torch.where(raw, 0, codes_in + (lost_in << 16))
    heads = torch.stack([base, torch.where(raw, -1, lengths), escapes], 1)
    return {"heads": _signed(heads.flatten()), "words": words, "freqs": model.freqs}


def read(
    parts: dict[str, Tensor], alphabet: Alphabet, *, dtype: torch.dtype, count: int
) -> tuple[Tensor, Tensor | None]:
    """Codes (int32) and where they stand for zero; values that no code carries are left to ``write_exact``."""
    chunk, device = alphabet.chunk, parts["words"].device
    base, lengths, codes_in, _ = _heads(parts, alphabet, dtype, count)
    words, freqs = parts["words"], parts["freqs"].long()
    if freqs.numel() != alphabet.symbols or int(freqs.sum()) != SCALE or int(freqs.amin()) < 0:
        raise PayloadError("rans payload: its shares do not sum to 4096: corrupted")
    if alphabet.predicted and int(freqs.amin()) == 0:
        raise PayloadError("rans payload: predicted, but not every symbol has a share: corrupted")
    coded = lengths >= 0
    longest = int(lengths.amax().clamp(min=0))
    place = torch.arange((longest + 1) // 2, device=device)
    at = (base + LANES).unsqueeze(1) + place
    pairs = words[torch.where(place < ((lengths + 1) // 2).unsqueeze(1), at, 0)].long() & 0xFFFFFFFF
    stream = torch.stack([pairs & 0xFFFF, pairs >> 16], 2).flatten(1)
    lanes = torch.arange(LANES, device=device)
    states = words[torch.where(coded.unsqueeze(1), base.unsqueeze(1) + lanes, 0)].long() & 0xFFFFFFFF
    symbols, sound = _decode(states, stream, lengths.clamp(min=0), freqs, alphabet)
    if not bool((sound | ~coded).all()):
        raise PayloadError("rans payload: a stream does not end where its encoder began: corrupted")
    weights = torch.tensor([alphabet.size**k for k in range(alphabet.values)], device=device)
    digits = _memory(symbols.unsqueeze(-1) // weights % alphabet.size, alphabet)
    digits = alphabet.sums(digits) if alphabet.predicted else digits
    zero = (digits == 0) & coded.repeat_interleave(chunk) if alphabet.zero else None
    q = (digits - int(alphabet.zero) + alphabet.low).to(torch.int32)
    owner = torch.arange(base.numel(), device=device).repeat_interleave(codes_in)
    if owner.numel():
        at = base[owner] + LANES + (lengths[owner] + 1) // 2 + exact.ranks(codes_in)
        place = exact.places(owner, (words[at] >> 16).long() & 0xFFFF, count, chunk)
        code = words[at] << 16 >> 16
        if zero is not None:
            zero[place] = code == ZERO_CODE
        q[place] = torch.where(code == ZERO_CODE, 0, code)
    return q[:count], None if zero is None else zero[:count]


def write_exact(parts: dict[str, Tensor], alphabet: Alphabet, flat: Tensor) -> None:
    """Put escaped values and raw chunks into the decoded values."""
    base, lengths, codes_in, lost_in = _heads(parts, alphabet, flat.dtype, flat.numel())
    at = base + LANES + (lengths.clamp(min=0) + 1) // 2 + codes_in
    exact.read_escapes(parts["words"], at, lost_in, flat, alphabet.chunk)
    exact.read_raw(parts["words"], base, lengths < 0, flat, alphabet.chunk)


def _heads(
    parts: dict[str, Tensor], alphabet: Alphabet, dtype: torch.dtype, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First word, length, escaped codes and escaped values of every chunk; refuses what does not fit together.

    ``words`` may be longer than what the chunks use: a GPU's buffer is made before its size is known.
    """
    heads, words = parts["heads"].long(), parts["words"]
    chunks = -(-count // alphabet.chunk)
    if heads.numel() != 3 * chunks:
        raise PayloadError(
            f"rans payload: {heads.numel()} numbers do not head {chunks} chunks of {count} values: "
            "truncated or corrupted"
        )
    base, lengths, escapes = heads.view(chunks, 3).unbind(1)
    base, codes_in, lost_in = base & 0xFFFFFFFF, escapes & 0xFFFF, escapes >> 16 & 0xFFFF
    coded = LANES + (lengths + 1) // 2 + codes_in + lost_in * exact.escape_words(dtype)
    counts = torch.where(lengths < 0, exact.raw_counts(dtype, count, alphabet.chunk, words.device), coded)
    order = base.argsort()
    ends = counts[order].cumsum(0)
    fits = (base[order] == ends - counts[order]) & (lengths >= -1) & ((lengths >= 0) | (escapes == 0))
    if not bool(fits.all()) or int(counts.sum()) > words.numel():
        raise PayloadError(
            f"rans payload: heads and {words.numel()} words contradict each other: truncated or corrupted"
        )
    return base, lengths, codes_in, lost_in


def _encode(symbols: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols (chunks, lanes, rounds) into final states, streams (chunks, longest, even) and their lengths."""
    chunks, lanes, rounds = symbols.shape
    before = freqs.cumsum(0) - freqs
    state = torch.full((chunks, lanes), _LOW, dtype=torch.int64, device=symbols.device)
    stream = torch.zeros((chunks, lanes * rounds + 2), dtype=torch.int64, device=symbols.device)
    length = torch.zeros(chunks, dtype=torch.int64, device=symbols.device)
    for turn in range(rounds - 1, -1, -1):
        symbol = symbols[:, :, turn]
        freq = freqs[symbol]
        emits = state >= freq << 19
        rank = emits.cumsum(1) - 1
        at = torch.where(emits, length.unsqueeze(1) + rank, stream.shape[1] - 1)  # the last place is thrown away
        stream.scatter_(1, at, torch.where(emits, state & 0xFFFF, 0))
        length += emits.sum(1)
        state = torch.where(emits, state >> 16, state)
        state = (state // freq << 12) + state % freq + before[symbol]
    stream[:, -1] = 0
    longest = int(length.amax()) if chunks else 0
    return state, stream[:, : longest + longest % 2], length


def _decode(state: Tensor, stream: Tensor, length: Tensor, freqs: Tensor, alphabet: Alphabet) -> tuple[Tensor, Tensor]:
    """Symbols (chunks, lanes, rounds), and which chunks end in the states and at the word that encoders begin with."""
    slots = torch.arange(freqs.numel(), device=freqs.device).repeat_interleave(freqs)
    before = freqs.cumsum(0) - freqs
    symbols = []
    left = length.clone()
    for _ in range(alphabet.rows * 4 // alphabet.values):
        slot = state & (SCALE - 1)
        symbol = slots[slot]
        state = freqs[symbol] * (state >> 12) + slot - before[symbol]
        needs = state < _LOW
        left = left - needs.sum(1)
        at = (left.unsqueeze(1) + needs.cumsum(1) - 1).clamp(0, max(stream.shape[1] - 1, 0))
        if stream.shape[1]:
            state = torch.where(needs, state << 16 | stream.gather(1, at), state)
        symbols.append(symbol)
    return torch.stack(symbols, 2), (state == _LOW).all(1) & (left == 0)


def _lanes(values: Tensor, alphabet: Alphabet) -> Tensor:
    """Memory order to (chunks, lanes, rounds, values of a symbol)."""
    lanes = values.view(-1, alphabet.rows, LANES, 4).transpose(1, 2).reshape(-1, LANES, alphabet.rows * 4)
    return lanes.unflatten(-1, (-1, alphabet.values))


def _memory(lanes: Tensor, alphabet: Alphabet) -> Tensor:
    """The inverse of ``_lanes``."""
    return lanes.reshape(-1, LANES, alphabet.rows, 4).transpose(1, 2).flatten()


def _signed(word: Tensor) -> Tensor:
    """The low 32 bits of int64 as int32."""
    word = word & 0xFFFFFFFF
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
