"""A bottleneck that no partition can beat, from computation alone, and the prices of devices that prove it.

Give each kind of device a price p >= 0 such that the prices of all devices sum to 1, and each node the value
``min over kinds of p x ms(node, kind)``. A stage that takes at most B milliseconds on a device of price p has nodes
worth at most p B, so all nodes together are worth at most B: their worth is a lower bound of the bottleneck (the dual
of the linear program that spreads every node over the devices at will). The same holds for a part of the pipeline:
devices whose prices sum to q can hold nodes worth at most q B. The search skips the cuts that this rules out.

Prices are improved from ``1 / (whole model's ms)`` by cyclic steps; any prices are valid, better ones bound tighter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.kernels.arrays import IntArray


@dataclass(frozen=True)
class WorkBound:
    """Attributes: per kind its ``prices``, per node its ``worth``, and ``bottleneck_ms``, the least possible."""

    prices: FloatArray
    worth: FloatArray
    bottleneck_ms: float


def work_bound(node_ms: FloatArray, counts: IntArray) -> WorkBound:
    """The bound for ``node_ms[kind, node]`` and so many devices of each kind."""
    heaviest = float(node_ms.min(axis=0).max())
    whole = node_ms.sum(axis=1)
    if not np.all(whole > 0):
        # Some kind computes in no time at all: nothing can be priced.
        return WorkBound(np.zeros(len(counts)), np.zeros(node_ms.shape[1]), heaviest)
    prices = _normal(1.0 / whole, counts)
    best = _worth(prices, node_ms)
    step = 0.25
    while step > 1e-4 and len(counts) > 1:
        improved = False
        for kind in range(len(counts)):
            for factor in (1 + step, 1 / (1 + step)):
                moved = prices.copy()
                moved[kind] *= factor
                moved = _normal(moved, counts)
                reached = _worth(moved, node_ms)
                if reached > best * (1 + 1e-9):
                    prices, best, improved = moved, reached, True
        if not improved:
            step /= 2
    worth = (prices[:, None] * node_ms).min(axis=0)
    return WorkBound(prices, worth, max(heaviest, float(worth.sum())))


def _normal(prices: FloatArray, counts: IntArray) -> FloatArray:
    normal: FloatArray = prices / float((prices * counts).sum())
    return normal


def _worth(prices: FloatArray, node_ms: FloatArray) -> float:
    return float((prices[:, None] * node_ms).min(axis=0).sum())
