"""Shared by all tests: one thread, so that results repeat bit for bit."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
