"""Check the kernel that makes probabilities of their logarithms in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 python tests/kernels/interpreted_probabilities.py``.
"""

from __future__ import annotations

import sys

from probability_cases import check, make_cases
from same_payload import run_cases

if __name__ == "__main__":
    sys.exit(run_cases(make_cases(), check))
