"""Interval tables against sums over sets."""

from __future__ import annotations

from hypothesis import given, settings
from planner_cases import chains

from hetpipe_compiler.passes.chain_tables import chain_tables


@settings(max_examples=100, deadline=None)
@given(chains(most=9))
def test_every_interval(chain):
    tables = chain_tables(chain)
    n = len(chain)
    assert tables.blocks == n
    for lo in range(n):
        for hi in range(lo + 1, n + 1):
            mine = set(range(lo, hi))
            read = [v for v in chain.values if v.producer < lo and mine & set(v.consumers)]
            made = [v for v in chain.values if v.producer in mine and max(v.consumers) >= hi]
            assert tables.received[lo, hi] == sum(v.forward_bytes for v in read)
            assert tables.sent_back[lo, hi] == sum(v.backward_bytes for v in read)
            assert tables.returned[lo, hi] == sum(v.backward_bytes for v in made)
            for name in ("parameters", "frozen", "saved"):
                held = sum(item.bytes for item in getattr(chain, name) if mine & set(item.blocks))
                assert getattr(tables, name)[lo, hi] == held
            if chain.resident is not None:
                assert tables.resident[lo, hi] == sum(chain.resident[lo:hi])
            for kind, times in chain.forward_ms.items():
                assert tables.forward_ms[kind][hi] - tables.forward_ms[kind][lo] == sum(times[lo:hi])
    assert (tables.resident is None) == (chain.resident is None)
