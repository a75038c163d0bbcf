"""How fast one virtual worker's pipeline runs under the static program.

Stage s runs ``F(1) ... F(w_s)`` and then ``B(p) F(p + w_s)`` for ever, in that order and nothing else. A message takes
its time on a link of its own, beside the computations. So every start is a maximum of ends plus constants, and the
long-run period is the largest ratio, over the cycles of that dependency graph, of milliseconds to minibatches.
`steady_period_ms` computes this limit exactly, so that equal plans get equal periods; `simulate_pipeline` plays a
finite run, fill and drain included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetpipe_compiler.passes.cached_kernel import cached_kernel
from hetpipe_compiler.passes.simulate.costs import FloatArray, PipelineCosts

__all__ = ["PipelineCosts", "WaveExchange", "simulate_pipeline", "steady_period_ms"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class WaveExchange:
    """What the parameter servers cost when all virtual workers are alike (the slowest never waits for another).

    Attributes:
        nm: Minibatches in a wave.
        staleness: D; the last minibatch of wave c then needs the exchange of wave c - D - 1.
        exchange_ms: Per stage, from the last update of a wave to having the new weights: push + pull. Shape (k,).
    """

    nm: int
    staleness: int
    exchange_ms: FloatArray


def steady_period_ms(
    costs: PipelineCosts,
    in_flight: Sequence[int],
    exchange: WaveExchange | None = None,
    *,
    minibatches: int | None = None,
) -> float:
    """Milliseconds per minibatch of the static program, in the long run.

    Args:
        costs: Times of the computations and messages.
        in_flight: w_s per stage, at least 1 and never increasing (else the program would wait for itself).
        exchange: Where given, the gated forwards wait for their wave's exchange.
        minibatches: None for the exact limit; else what a run of so many shows over its last third.

    Raises:
        ValueError: ``in_flight`` does not fit the pipeline or increases somewhere.
    """
    w = _checked(costs, in_flight)
    nm, lag, wait = _exchange(costs, exchange)
    if minibatches is None:
        return float(
            _longest_cycle(
                costs.forward_ms, costs.backward_ms, costs.activation_ms, costs.gradient_ms, w, nm, lag, wait
            )
        )
    ends = simulate_pipeline(costs, in_flight, minibatches, exchange)[1].max(axis=0)
    window = max(minibatches // 3 // nm, 1) * nm
    if window >= minibatches:
        raise ValueError(f"{minibatches} minibatches are too few for waves of {nm}")
    return float(ends[-1] - ends[-1 - window]) / window


def simulate_pipeline(
    costs: PipelineCosts, in_flight: Sequence[int], minibatches: int, exchange: WaveExchange | None = None
) -> tuple[FloatArray, FloatArray]:
    """End times (ms from the start) of every forward and every backward, each of shape (k, minibatches)."""
    w = _checked(costs, in_flight)
    nm, lag, wait = _exchange(costs, exchange)
    forward_end, backward_end = _play(
        costs.forward_ms, costs.backward_ms, costs.activation_ms, costs.gradient_ms, w, nm, lag, wait, minibatches
    )
    return forward_end, backward_end


def _checked(costs: PipelineCosts, in_flight: Sequence[int]) -> IntArray:
    w = np.asarray(in_flight, dtype=np.int64)
    if w.shape != (len(costs),) or (w < 1).any() or (np.diff(w) > 0).any():
        problem = f"in-flight counts {tuple(in_flight)} for {len(costs)} stages"
        raise ValueError(f"{problem}: one each, at least 1, never increasing")
    return w


def _exchange(costs: PipelineCosts, exchange: WaveExchange | None) -> tuple[int, int, FloatArray]:
    """(unrolled minibatches, minibatches between a gated forward and the backward it waits for or 0, ms)."""
    if exchange is None:
        return 1, 0, np.zeros(len(costs))
    return exchange.nm, (exchange.staleness + 1) * exchange.nm, np.asarray(exchange.exchange_ms, dtype=np.float64)


@cached_kernel
def _play(
    forward_ms: FloatArray,
    backward_ms: FloatArray,
    activation_ms: FloatArray,
    gradient_ms: FloatArray,
    w: IntArray,
    nm: int,
    lag: int,
    wait: FloatArray,
    minibatches: int,
) -> tuple[FloatArray, FloatArray]:
    """The ends of all forwards and backwards. Column p - 1 holds minibatch p.

    Turn t runs B(t) on the stages from the last to the first, then F(t + w_s) from the first to the last: as w never
    increases, everything that an instruction waits for then has its end already.
    """
    k = len(forward_ms)
    forward_end = np.zeros((k, minibatches))
    backward_end = np.zeros((k, minibatches))
    free = np.zeros(k)
    for turn in range(minibatches + 1):
        if turn > 0:
            p = turn - 1
            for s in range(k - 1, -1, -1):
                start = free[s]
                for j in range(s + 1, k):
                    if not np.isnan(gradient_ms[j, s]):
                        start = max(start, backward_end[j, p] + gradient_ms[j, s])
                free[s] = backward_end[s, p] = start + backward_ms[s]
        for s in range(k):
            first = 0 if turn == 0 else turn + w[s] - 1
            for p in range(first, min(turn + w[s], minibatches)):
                start = free[s]
                for i in range(s):
                    if not np.isnan(activation_ms[i, s]):
                        start = max(start, forward_end[i, p] + activation_ms[i, s])
                if lag > 0 and (p + 1) % nm == 0 and p >= lag:
                    start = max(start, backward_end[s, p - lag] + wait[s])
                free[s] = forward_end[s, p] = start + forward_ms[s]
    return forward_end, backward_end


@cached_kernel
def _edges(
    forward_ms: FloatArray,
    backward_ms: FloatArray,
    activation_ms: FloatArray,
    gradient_ms: FloatArray,
    w: IntArray,
    lag: int,
    wait: FloatArray,
) -> tuple[IntArray, IntArray, FloatArray, IntArray]:
    """What each end waits for: (tail, head, ms from tail's end to head's end, minibatches that the tail is earlier).

    Nodes: 2 s for the forward and 2 s + 1 for the backward of stage s. A gate (at every nm-th minibatch) has a negative
    head, -1 - node.
    """
    k = len(forward_ms)
    most = k * (k + 3)
    tail = np.empty(most, np.int64)
    head = np.empty(most, np.int64)
    ms = np.empty(most, np.float64)
    earlier = np.empty(most, np.int64)
    n = 0
    for s in range(k):
        tail[n], head[n], ms[n], earlier[n] = 2 * s + 1, 2 * s, forward_ms[s], w[s]
        n += 1
        tail[n], head[n], ms[n], earlier[n] = 2 * s, 2 * s + 1, backward_ms[s], 1 - w[s]
        n += 1
        if lag > 0:
            tail[n], head[n], ms[n], earlier[n] = 2 * s + 1, -1 - 2 * s, wait[s] + forward_ms[s], lag
            n += 1
        for i in range(s):
            if not np.isnan(activation_ms[i, s]):
                tail[n], head[n], ms[n], earlier[n] = 2 * i, 2 * s, activation_ms[i, s] + forward_ms[s], 0
                n += 1
            if not np.isnan(gradient_ms[s, i]):
                tail[n], head[n], ms[n], earlier[n] = 2 * s + 1, 2 * i + 1, gradient_ms[s, i] + backward_ms[i], 0
                n += 1
    return tail[:n], head[:n], ms[:n], earlier[:n]


@cached_kernel
def _longest_cycle(
    forward_ms: FloatArray,
    backward_ms: FloatArray,
    activation_ms: FloatArray,
    gradient_ms: FloatArray,
    w: IntArray,
    nm: int,
    lag: int,
    wait: FloatArray,
) -> float:
    """The largest ms per minibatch over all cycles, by Newton's method on the ratio.

    Start with a ratio that some cycle has (the busiest stage's), look for a cycle that is longer than the ratio allows
    (Bellman-Ford), take that cycle's ratio, and stop when there is none: each ratio is an actual cycle's, so the end is
    exact. The graph is unrolled over nm minibatches, because gates sit at every nm-th.
    """
    tail, head, ms, earlier = _edges(forward_ms, backward_ms, activation_ms, gradient_ms, w, lag, wait)
    per_phase = 2 * len(forward_ms)
    nodes = per_phase * nm
    distance = np.zeros(nodes)
    via_edge = np.zeros(nodes, np.int64)
    via_node = np.zeros(nodes, np.int64)
    ratio = np.max(forward_ms + backward_ms)
    slack = 1e-12 * (np.sum(ms) + 1e-300)
    while True:
        distance[:] = 0.0
        longer = -1
        for _ in range(nodes + 1):
            longer = -1
            for phase in range(nm):
                for e in range(len(tail)):
                    to = head[e]
                    if to < 0:
                        if phase != 0:
                            continue
                        to = -1 - to
                    start = (phase - earlier[e]) % nm * per_phase + tail[e]
                    reach = distance[start] + ms[e] - ratio * earlier[e]
                    to += phase * per_phase
                    if reach > distance[to] + slack:
                        distance[to] = reach
                        via_edge[to], via_node[to] = e, start
                        longer = to
            if longer < 0:
                return ratio
        for _ in range(nodes):  # walk back until surely on the cycle
            longer = via_node[longer]
        total_ms, total_earlier, at = 0.0, 0, longer
        while True:
            total_ms += ms[via_edge[at]]
            total_earlier += earlier[via_edge[at]]
            at = via_node[at]
            if at == longer:
                break
        if total_earlier <= 0 or total_ms / total_earlier <= ratio:
            return ratio
        ratio = total_ms / total_earlier
