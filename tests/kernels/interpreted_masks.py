"""Compare the twins of ``bitmask`` and ``window_index`` with their codecs in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 python tests/kernels/interpreted_masks.py``.
"""

from __future__ import annotations

import sys
from itertools import chain

from mask_cases import FLOATS, check, make_mask_cases, make_truth_cases, make_window_cases
from same_payload import run_cases

if __name__ == "__main__":
    cases = chain(*map(make_mask_cases, FLOATS.values()), make_truth_cases(), make_window_cases())
    sys.exit(run_cases(cases, check))
