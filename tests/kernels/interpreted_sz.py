"""Compare the Triton twin of ``sz`` with the codec in Triton's interpreter.

TRITON_INTERPRET=1 python tests/kernels/interpreted_sz.py fp32|fp16|bf16
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import triton
from same_payload import run_cases
from sz_cases import DTYPES, Case, check, check_other_uses, make_cases
from triton.runtime.interpreter import interpreter_builder

from lowtide import kernels
from lowtide.codecs.sz import Sz
from lowtide.coding import blocks
from lowtide.kernels import sz
from lowtide.records import Encoded

PRODUCTION = sz._CHUNKS
# What a program handles is not part of the format; more chunks to a program are fewer programs to interpret.
MOST_CHUNKS = 8


def check_interpreted(case: Case, device: torch.device) -> Encoded:
    """Some cases go through every path as they are launched on a device."""
    production = case.name == "every path" and case.keep_zeros and case.rounding == "dither" and case.x.itemsize == 4
    needed = triton.next_power_of_2(-(-case.x.numel() // blocks.CHUNK) or 1)
    sz._CHUNKS = PRODUCTION if production else min(needed, MOST_CHUNKS)
    return check(case, device, sz.SzKernel)


if __name__ == "__main__":
    # Every sum and product is made twice, for an assertion that only Triton's debug mode looks at: a third of the time.
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
    dtype, codec = DTYPES[sys.argv[1]], Sz(coder="blocks")
    assert kernels.twin(codec, torch.device("cpu"), dtype) == sz.SzKernel(codec)
    check_other_uses(sz.SzKernel(codec), torch.device("cpu"))
    sys.exit(run_cases(make_cases(dtype), check_interpreted))
