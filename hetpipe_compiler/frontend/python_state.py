"""What modules hold in Python, outside their parameters, buffers and submodules: numbers, texts, containers, objects;
also in their classes, in the variables of the files that these are written in, in closures and in generators.

Export follows one call of ``forward``. What the call changes here is lost on it, so the change must be seen. A
`PythonState` is what there was at one moment: each value under its name, such as ``calls['n']``, and enough to put it
back (but for plain values of classes, files and closures). Out of reach: variables of other files, and objects of
Python's own library and of torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch

from hetpipe_compiler.ir.source import is_internal

#: Path of a module below the training step, and where in it: an attribute, or what lies in one.
Place: TypeAlias = tuple[str, str]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_DICTS = (dict, OrderedDict, defaultdict, Counter, WeakKeyDictionary, WeakValueDictionary, os._Environ)
_SETS = (set, WeakSet)
_CACHE = functools._lru_cache_wrapper
#: Attributes of every module; its train flag is one that forward may change.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
#: What a context variable without a value says.
_UNSET = (None,)
#: How far and how much is looked at: below one attribute, in one container, in one array (bytes).
_DEPTH, _MOST_ITEMS, _MOST_BYTES = 8, 4096, 1 << 20


@dataclass(frozen=True)
class Items:
    """A container, by how much it holds."""

    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} item{'' if self.count == 1 else 's'}"


@dataclass(frozen=True)
class Unsaid:
    """A state that is compared but means nothing to people.

    Attributes:
        kind: What it is the state of.
        state: What is compared.
        draws: Whether it is that of a generator of random numbers.
    """

    kind: str
    state: Any
    draws: bool = False

    def __str__(self) -> str:
        return self.kind


@dataclass(eq=False)
class PythonState:
    """The state of a training step at one moment.

    Attributes:
        values: Every value by its place, a container before what lies in it. Tensors are themselves, containers are
            `Items`, and whatever else has a state to compare is a text or `Unsaid`.
        caches: Functions that remember what they have returned (``functools.lru_cache``).
    """

    values: dict[Place, Any] = field(default_factory=dict)
    caches: list[Any] = field(default_factory=list)
    _contents: list[tuple[Any, Any]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, step: torch.nn.Module) -> PythonState:
        """The state of the modules below ``step``, and of its loss if that is an object."""
        state = cls()
        modules = [(path, module) for path, module in step.named_modules() if path]
        state._seen.update(id(module) for _, module in modules)
        for path, module in modules:
            own = _attributes(module)
            state._contents.append((vars(module), own))
            # Hooks of a module that hooks itself at its first call go with its note that it has.
            hooks = [vars(module)[name] for name in _OF_EVERY_MODULE if name.endswith("_hooks")]
            state._contents += [(held, dict(held)) for held in hooks]
            for name, value in (*own.items(), *module._buffers.items()):
                state._look(path, name, value, 0)
            state._look_around(path, type(module))
        loss = getattr(step, "loss", None)
        if not isinstance(loss, torch.nn.Module):
            state._look("loss", "", loss, 0)
            state._look_around("loss", loss if isinstance(loss, FunctionType) else type(loss))
        state._look("", "environ", os.environ, 0)
        return state

    def put_back(self, stand_in: Callable[[Any], Any] = lambda value: value) -> None:
        """Have the modules hold this again, in the same containers; ``stand_in`` gives what to put for a tensor or a
        symbolic number."""
        for holder, contents in self._contents:
            _fill(holder, contents, stand_in)

    def changed(self, before: PythonState) -> dict[Place, tuple[Any, Any]]:
        """What was another value before, or was not there: old and new value. One tensor is as good as another."""
        places = dict.fromkeys((*self.values, *before.values))
        pairs = {at: (before.values.get(at), self.values.get(at)) for at in places}
        return {at: pair for at, pair in pairs.items() if not _same(*pair)}

    def _look_around(self, path: str, code: Any, *, file: bool = True) -> None:
        """Note what lies in a class or a function of the model's code, and in the file that it is written in."""
        own = [(c, "of its class") for c in getattr(code, "__mro__", ()) if not _is_foreign(c.__module__)]
        for holder, where in (*own, (sys.modules.get(code.__module__) if file else None, "of its file")):
            if holder is None or id(holder) in self._seen or _is_foreign(code.__module__):
                continue
            self._seen.add(id(holder))
            for name, value in list(vars(holder).items()):
                if not name.startswith("__"):
                    self._look(path, f"{name} ({where})", value, 0)

    def _look(self, path: str, name: str, value: Any, depth: int) -> None:
        """Note the value and what lies in it."""
        if isinstance(value, (torch.Tensor, *_PLAIN)):
            self.values[path, name] = value
        elif isinstance(value, _SYMBOLS):
            self.values[path, name] = str(value)
        elif id(value) in self._seen or depth > _DEPTH:
            return
        elif isinstance(value, FunctionType) and not is_internal(value.__code__.co_filename):
            self._seen.add(id(value))
            for key, part in (*vars(value).items(), *_enclosed(value)):
                self._look(path, f"{name}.{key}", part, depth + 1)
        elif isinstance(value, _CACHE):
            self.caches.append(value)
            self._contents.append((value, value.cache_info().misses))
        elif isinstance(value, _CODE):
            return
        elif (state := _own_state(value)) is not None:
            self.values[path, name] = state
        else:
            self._seen.add(id(value))
            self._look_into(path, name, value, depth)

    def _look_into(self, path: str, name: str, value: Any, depth: int) -> None:
        if isinstance(value, ContextVar):
            self._contents.append((value, [value.get(*_UNSET)]))
            self._look(path, f"{name}.get()", value.get(*_UNSET), depth + 1)
        elif isinstance(value, (*_DICTS, *_SETS, dict, list, tuple, deque, frozenset)):
            self.values[path, name] = Items(type(value).__name__, len(value))
            if len(value) > _MOST_ITEMS:
                return
            if type(value) in (*_DICTS, *_SETS, list, deque):
                self._contents.append((value, _copy(value)))
            if isinstance(value, (*_SETS, frozenset)):
                self.values[path, name + " (in it)"] = " ".join(sorted(map(_key, value)))
                return
            pairs = value.items() if isinstance(value, _DICTS) else enumerate(value)
            keys: Counter[str] = Counter()
            for key, part in list(pairs):
                title = _key(key)
                keys[title] += 1
                again = f" {keys[title]}" if keys[title] > 1 else ""
                self._look(path, f"{name}[{title}{again}]", part, depth + 1)
        elif hasattr(value, "__dict__") and not _foreign(value):
            own = _attributes(value)
            self._contents.append((vars(value), own))
            for key, part in own.items():
                self._look(path, f"{name}.{key}".lstrip("."), part, depth + 1)
            self._look_around(path, type(value), file=False)


def _attributes(owner: Any) -> dict[str, Any]:
    names = _OF_EVERY_MODULE if isinstance(owner, torch.nn.Module) else ()
    return {name: value for name, value in vars(owner).items() if name not in names}


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, _DICTS) else list(container)


def _fill(holder: Any, contents: Any, stand_in: Callable[[Any], Any]) -> None:
    """Give a container or a ``__dict__`` its contents; it is left alone where it has them. A cache that was asked for
    something new forgets all: it may hold what only export can use."""
    if isinstance(holder, _CACHE):
        if holder.cache_info().misses != contents:
            holder.cache_clear()
        return
    if isinstance(holder, ContextVar):
        if holder.get(*_UNSET) is not contents[0]:
            holder.set(_deep(contents[0], stand_in))
        return
    if isinstance(holder, _DICTS):
        wanted = {key: _deep(value, stand_in) for key, value in contents.items()}
        for key in [k for k in holder if k not in wanted and k not in _OF_EVERY_MODULE]:
            del holder[key]
        for key, value in wanted.items():
            if key not in holder or holder[key] is not value:
                holder[key] = value
        return
    new = [_deep(value, stand_in) for value in contents]
    old = list(holder)
    if len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True)):
        return
    holder.clear()
    if isinstance(holder, _SETS):
        holder.update(new)
    else:
        holder.extend(new)


def _deep(value: Any, stand_in: Callable[[Any], Any]) -> Any:
    """The value with its stand-ins; a tuple is made anew where something in it has one."""
    if isinstance(value, (torch.Tensor, *_SYMBOLS)):
        return stand_in(value)
    if type(value) in (tuple, torch.Size):
        parts = [_deep(part, stand_in) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    return value


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    return type(old) is type(new) and bool(old == new or (old != old and new != new))


def _own_state(value: Any) -> str | Unsaid | None:
    """The state of what is no container and has no attributes to look at."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, random.Random):
        return Unsaid(f"the state of a {kind}", value.getstate(), draws=True)
    if isinstance(value, np.random.Generator):
        return Unsaid("the state of a numpy.random.Generator", str(value.bit_generator.state), draws=True)
    if isinstance(value, np.random.RandomState):
        name, keys, *position = value.get_state(legacy=True)
        state = name, np.asarray(keys).tobytes(), *position
        return Unsaid("the state of a numpy.random.RandomState", state, draws=True)
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= _MOST_BYTES:
        return Unsaid(f"a NumPy array of {value.dtype} {value.shape}", value.tobytes())
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        plain = {name: v for name, v in frame.f_locals.items() if isinstance(v, _PLAIN)} if frame else {}
        return Unsaid("the state of a generator", (frame.f_lasti if frame else None, plain))
    return repr(value) if isinstance(value, (itertools.count, np.generic)) else None


def _enclosed(function: FunctionType) -> list[tuple[str, Any]]:
    """The variables that a function has from around it."""
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found.append((name, cell.cell_contents))
    return found


def _foreign(value: Any) -> bool:
    """An object of Python's own library or of torch's, which may count for itself (but for a plain namespace)."""
    inside = isinstance(value, (SimpleNamespace, threading.local, torch.nn.Module))
    return not inside and _is_foreign(type(value).__module__)


def _is_foreign(module: str) -> bool:
    package = module.partition(".")[0]
    return package in ("torch", "numpy") or package in sys.stdlib_module_names


def _key(key: Any) -> str:
    plain = isinstance(key, _PLAIN) or (type(key) is tuple and all(isinstance(part, _PLAIN) for part in key))
    return repr(key) if plain else type(key).__name__
