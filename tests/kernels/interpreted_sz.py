"""Compare the twin of ``sz`` with the codec in Triton's interpreter. A script, because TRITON_INTERPRET=1 must be set
before Triton is first imported and holds for the whole process.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_sz.py fp32|fp16|bf16
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable

import torch
from sz_cases import DTYPES, Case, check, make_cases

from lowtide.kernels import sz

# What a program handles is not part of the format; more chunks to a program are fewer programs to interpret.
FEW_PROGRAMS = 8


def main(cases: Iterable[Case]) -> int:
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN: an element not written shows
    production, failed, count = sz._CHUNKS, 0, 0
    for count, case in enumerate(cases, 1):
        # The first case goes through every path as it is launched on a device.
        sz._CHUNKS = production if count == 1 else FEW_PROGRAMS
        try:
            check(case, torch.device("cpu"))
        except Exception as error:
            failed += 1
            print(f"FAILED {case}", file=sys.stderr)
            traceback.print_exception(error, limit=-2)
    print(f"{count - failed} of {count} cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before this script starts"
    sys.exit(main(make_cases(DTYPES[sys.argv[1]])))
