"""Pieces that kernels share: floats by their bits, extremes that keep NaN, the dither's hash.

Each does, sum for sum and product for product, what its codec does in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(x):
    """To float32; bfloat16 by its bits, because Triton's interpreter loses its subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def lower_of(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def higher_of(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def key_of(low_key, number_ptr, REPLAYED: tl.constexpr):
    """The dither's first key. A launch of a graph has the same one every time: there a number in memory is added."""
    if REPLAYED:
        return low_key.to(tl.uint32) + tl.load(number_ptr).to(tl.uint32)
    else:
        return low_key


@triton.jit
def hash_word(word, low_key, high_key):
    word = word + low_key.to(tl.uint32)
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ high_key.to(tl.uint32)
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def reciprocal(scale):
    """As in the codec: the same products and sums."""
    guess = (0x7EF311C7 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    for _ in tl.static_range(3):
        guess = guess * (2.0 - scale * guess)
    return guess


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """A float32 that is exact in ``dtype``; see ``widen``."""
    if dtype == tl.bfloat16:
        return (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def round_bf16(value):
    """Nearest bfloat16, ties to even, as float32 (Triton's interpreter rounds its casts otherwise)."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(value == value, bits, 0x7FC00000).to(tl.float32, bitcast=True)
