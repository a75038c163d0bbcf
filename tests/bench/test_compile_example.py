"""Models that weigh more than the memory of this machine can be planned on it (minutes)."""

from __future__ import annotations

import pytest
from converters import load


@pytest.mark.slow
@pytest.mark.parametrize(("name", "billions"), [("llama7b", 6.74), ("bert5b", 4.90)])
def test_billions_of_parameters_are_compiled_in_4_gb(name: str, billions: float, tmp_path) -> None:
    pytest.importorskip("transformers")
    compiling = load("compile_example")
    took = compiling.compile_example(name, tmp_path / "plan")
    print(took)
    assert compiling.parameters_of(tmp_path / "plan") / 1e9 == pytest.approx(billions, abs=0.01)
    assert took.peak_bytes < 4e9
