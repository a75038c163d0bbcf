"""A kernel is taken from the cache on disk, and computes the same where there is no room or no place for one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import FunctionCache

from hetpipe_compiler.passes.cached_kernel import cached_kernel
from hetpipe_compiler.passes.kernels.compiled import compiled


def step_in(file: str) -> Any:
    """``step(x)`` as if it stood in ``file``."""
    names: dict[str, Any] = {}
    exec(compile("def step(x):\n    return x + 1\n", file, "exec"), names)
    return names["step"]


@pytest.mark.parametrize("compiler", [cached_kernel, compiled])
def test_without_a_place_for_the_cache(compiler: Callable[[Any], Any]) -> None:
    step = step_in("<nowhere>")
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(step, cache=True)
    assert compiler(step)(1) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fails(*_: object) -> None:
        raise OSError(code, "refused")

    (tmp_path / "steps.py").write_text("")
    monkeypatch.setattr(FunctionCache, "save_overload", fails)
    monkeypatch.setattr(FunctionCache, "load_overload", fails)
    assert cached_kernel(step_in(str(tmp_path / "steps.py")))(1) == 2
