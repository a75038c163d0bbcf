"""The most that a plan may be asked for: the proof of its schedule takes D x Nm minibatches."""

from __future__ import annotations

#: Nm, minibatches in flight in a virtual worker (the paper has up to 7).
MOST_IN_FLIGHT = 1000

#: D, clocks that a virtual worker may be ahead (the paper has up to 32).
MOST_CLOCKS = 1000
