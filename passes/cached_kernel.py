"""`cached_kernel`: numba's njit with its cache on disk; where there is none, a kernel is compiled in every process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

_Function = TypeVar("_Function", bound=Callable[..., object])


class _LenientCache(FunctionCache):
    """numba's own raises what the disk does (full, read-only); a plan needs no cache."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(OSError):
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def cached_kernel(function: _Function, **options: Any) -> _Function:
    """``function``, compiled at its first call; ``options`` are njit's."""
    kernel: Any = numba.njit(function, **options)
    with suppress(RuntimeError):  # numba: no folder to keep it in (NUMBA_CACHE_DIR, beside the file, ~/.cache)
        kernel._cache = _LenientCache(kernel.py_func)  # type: ignore[no-untyped-call]
    compiled_function: _Function = kernel
    return compiled_function
