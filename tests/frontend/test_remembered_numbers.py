"""Functions that remember what they returned: a table is computed in the graph, random numbers are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_net import captured, line_of

from hetpipe_compiler.errors import WorkloadError

_TOP = """
import functools
@functools.lru_cache
def table(n):
    import torch
    return torch.{what}(n).float()
class Tables:
    @functools.cache
    def table(self, n): return table(n)
"""


@pytest.mark.parametrize("call", ["table(8)", "self.tables.table(8)"])
def test_a_table_is_made_in_both_graphs(call: str, tmp_path: Path) -> None:
    """What the cache holds after the first export belongs to that alone."""
    top, init = _TOP.replace("{what}", "arange"), "self.tables = Tables()"
    found = captured(tmp_path, f"h = h + {call} + {call}", top, init, evaluation=True)
    assert found.in_eval is not None, found.evaluation_note
    for graph in (found.graph_module.graph, found.in_eval.graph_module.graph):
        assert sum(n.target is torch.ops.aten.arange.default for n in graph.nodes) == 1


def test_random_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="in 'table', which remembers") as caught:
        captured(tmp_path, "h = h + table(8)", _TOP.replace("{what}", "randn"))
    assert caught.value.code == "HP113"
    assert str(caught.value.where).endswith(line_of(tmp_path, "torch.randn"))
