"""In-flight rules and the enumeration of vectors."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe_compiler.passes.in_flight import LEANEST, MAX_VECTORS, RICHEST, RULES, InFlightRule, vectors


@given(st.integers(1, 20), st.integers(1, 10), st.sampled_from(RULES))
def test_rules_keep_the_shape_of_the_default_program(nm, stages, rule):
    vector = rule.vector(nm, stages)
    assert len(vector) == stages
    assert vector[-1] == 1
    assert vector[0] == (nm if stages > 1 else 1)
    assert list(vector) == sorted(vector, reverse=True)
    lean, rich = LEANEST.vector(nm, stages), RICHEST.vector(nm, stages)
    assert all(a <= w <= b for a, w, b in zip(lean, vector, rich, strict=True))


def test_known_vectors():
    assert InFlightRule(1.0).vector(4, 4) == (4, 3, 2, 1)
    assert InFlightRule(2.0).vector(7, 4) == (7, 5, 3, 1)
    assert LEANEST.vector(5, 3) == (5, 1, 1)
    assert RICHEST.vector(5, 3) == (5, 5, 1)
    assert RICHEST.vector(5, 1) == (1,)


@pytest.mark.parametrize(("nm", "stages"), [(1, 1), (1, 4), (3, 2), (4, 3), (5, 4), (3, 5)])
def test_enumeration_is_complete_and_lean_first(nm, stages):
    limits = (nm,) * stages
    shape = [w for w in product(range(1, nm + 1), repeat=stages) if list(w) == sorted(w, reverse=True) and w[-1] == 1]
    expected = {w for w in shape if w[0] == nm} if stages > 1 else {(1,)}
    found = vectors(nm, limits)
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [sum(w) for w in found] == sorted(sum(w) for w in found)


def test_limits_are_kept():
    assert vectors(3, (3, 2, 1, 5)) == [(3, 1, 1, 1), (3, 2, 1, 1)]
    assert vectors(4, (3, 3, 3)) == []


def test_too_many_vectors_fall_back_to_a_family():
    found = vectors(20, (20,) * 12)
    assert 5 < len(found) <= MAX_VECTORS
    assert LEANEST.vector(20, 12) in found
    assert RICHEST.vector(20, 12) in found
    assert all(list(w) == sorted(w, reverse=True) and (w[0], w[-1]) == (20, 1) for w in found)
