"""Cyclic garbage is not looked for inside, and is again afterwards, also after an error."""

from __future__ import annotations

import gc

import pytest

from hetpipe_compiler.garbage import no_cyclic_garbage, seldom_cyclic_garbage


def test_off_inside_and_as_before_outside():
    assert gc.isenabled()
    with no_cyclic_garbage():
        assert not gc.isenabled()
        with no_cyclic_garbage():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), no_cyclic_garbage():
        raise KeyError
    assert gc.isenabled()


def test_the_search_is_as_often_as_before_behind_it() -> None:
    before = gc.get_threshold()
    with seldom_cyclic_garbage():
        assert gc.isenabled()
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), seldom_cyclic_garbage():
        raise KeyError
    assert gc.get_threshold() == before
