from __future__ import annotations

import sys
from pathlib import Path

for folder in ("graphs", "kernels", "recompute"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))
