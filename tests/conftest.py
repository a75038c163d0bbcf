"""Shared by all tests: one thread (results then repeat bit for bit), and `oracles` importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
