"""Compare the twin of ``division`` with the codec in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 python tests/kernels/interpreted_division.py``.
"""

from __future__ import annotations

import sys
from itertools import chain

from division_cases import DTYPES, check, make_cases
from same_payload import run_cases

if __name__ == "__main__":
    sys.exit(run_cases(chain.from_iterable(map(make_cases, DTYPES.values())), check))
