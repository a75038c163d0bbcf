"""`compiled`: numba's njit with its cache on disk, safe for kernels that call each other from file to file.

numba takes a cached kernel for fresh as long as its own file is the same. What it was compiled with from other files is
inside it all the same: kernels that it calls, constants, the order of a named tuple's fields. So here a cached kernel
is fresh only as long as every file of this folder is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hetpipe_compiler.passes.cached_kernel import cached_kernel

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """``function``, compiled at its first call."""
    return _fresh(cached_kernel(function), function)


def inlined(function: _Function) -> _Function:
    """The same, its body put into each caller."""
    return _fresh(cached_kernel(function, inline="always"), function)


def _fresh(kernel: Any, function: _Function) -> _Function:
    # numba compares this stamp (a file's time and size) with the one in the cache, and has no other hook for it.
    index = getattr(kernel._cache, "_cache_file", None)  # None: there is no place for a cache
    if index is not None:
        index._source_stamp = (index._source_stamp, folder_digest(Path(function.__code__.co_filename).parent))
    compiled_function: _Function = kernel
    return compiled_function


@cache
def folder_digest(folder: Path) -> str:
    """Of the content of a folder's Python files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
