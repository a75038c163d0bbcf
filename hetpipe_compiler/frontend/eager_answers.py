"""What model code that asks how it is run hears while export looks: what it would hear in eager mode.

1. ``torch.compiler.is_compiling()`` and its kin say False, by whatever name a loaded module calls them.
2. ``type`` and ``isinstance`` say what a tensor or a size is in eager mode, in the files of the model and of the
   libraries that its modules come from: the tensors and sizes that export puts in their place are of other types.
3. In eval mode ``torch.is_grad_enabled()`` says False: stages evaluate without gradients, but are exported with them.

Torch's own code hears the truth. So does a library whose eager way export cannot follow, if it asked: it knows export,
and goes another way for it. The user's own files never do.
Out of reach: ``requires_grad`` in eval mode, a tensor's ``__class__``, ``match`` on the type of a size, and what is a
parameter's own; a model that asks for one of the last three is found out by `hetpipe_compiler.frontend.eager_check`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch._dynamo.external_utils
from torch._subclasses import FakeTensor

from hetpipe_compiler.frontend.gradient_hooks import SeenNode
from hetpipe_compiler.ir.source import is_internal

#: What each symbol of export's is in eager mode: a value of its type.
_IN_EAGER: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
_LEGACY = type(torch.FloatTensor)


@dataclass
class EagerAnswers:
    """The answers during one capture.

    Attributes:
        path: The user's file; what lies below its folder is the user's own.
        truth_for_libraries: Whether libraries hear that export looks.
        asked_by_library: Whether one has asked.
    """

    path: Path
    truth_for_libraries: bool = False
    asked_by_library: bool = False

    @contextlib.contextmanager
    def given(self, step: torch.nn.Module) -> Iterator[None]:
        """The rules, while export looks at ``step``."""
        packages = _packages(step)
        files = [vars(m) for m in _modules() if self._is_of_model(m, packages)]
        shadows: dict[str, Any] = {"type": _Type, "isinstance": _isinstance}
        shadowed = [(file, name) for file in files for name in shadows if name not in file]
        try:
            for file, name in shadowed:
                file[name] = shadows[name]
            answers = {real: self._answer(real) for real in _questions()}
            with _in_place_of(answers), no_gradients_in_eval_mode(step):
                yield
        finally:
            for file, name in shadowed:
                file.pop(name, None)

    def _answer(self, real: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            asking = sys._getframe(1)
            return real() if self._hears_truth(asking) else False

        return answer

    def _hears_truth(self, asking: FrameType) -> bool:
        name = asking.f_code.co_filename
        if is_internal(name):
            return True
        if self._is_own(name):
            return False
        self.asked_by_library = True
        return self.truth_for_libraries

    def _is_own(self, file: str) -> bool:
        folders = {str(folder) + os.sep for folder in (self.path.absolute().parent, self.path.resolve().parent)}
        return str(Path(file).absolute()).startswith(tuple(folders)) and "site-packages" not in Path(file).parts

    def _is_of_model(self, module: ModuleType, packages: set[str]) -> bool:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or is_internal(file):
            return False
        return module.__name__.partition(".")[0] in packages or self._is_own(file)


@contextlib.contextmanager
def no_gradients_in_eval_mode(step: torch.nn.Module) -> Iterator[None]:
    """While ``step`` runs in eval mode ``torch.is_grad_enabled()`` says False to all but torch's own code."""
    real = torch.is_grad_enabled

    def answer() -> bool:
        return real() and is_internal(sys._getframe(1).f_code.co_filename)

    with _in_place_of({} if step.training else {real: answer}):
        yield


@contextlib.contextmanager
def _in_place_of(stand_ins: dict[Any, Any]) -> Iterator[None]:
    """Put functions in the place of others, by whatever name a loaded module has them."""
    by_id = {id(real): real for real in stand_ins}
    held = [
        (vars(module), name, value)
        for module in (_modules() if stand_ins else ())
        for name, value in list(vars(module).items())
        if by_id.get(id(value), by_id) is value
    ]
    try:
        for holder, name, value in held:
            holder[name] = stand_ins[value]
        yield
    finally:
        for holder, name, value in held:
            holder[name] = value


def _modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _packages(step: torch.nn.Module) -> set[str]:
    """The packages that the modules' classes come from."""
    classes = {kind for module in step.modules() for kind in type(module).__mro__}
    return {kind.__module__.partition(".")[0] for kind in classes} - {"torch", *sys.stdlib_module_names}


def _questions() -> tuple[Callable[[], bool], ...]:
    """Torch's functions that are True while export looks, and False in eager mode."""
    return (
        torch.compiler.is_compiling,
        torch.compiler.is_exporting,
        torch._dynamo.external_utils.is_compiling,
        torch._utils.is_compiling,
        torch.fx._symbolic_trace.is_fx_tracing,
    )


class _Meta(type):
    """Makes a class that answers for ``type``, also as a base and in checks."""

    def __call__(cls, *args: Any, **more: Any) -> Any:
        if cls is _Type and len(args) == 1 and not more:
            return _eager_type(args[0])
        return type(*args, **more) if cls is _Type else super().__call__(*args, **more)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type) if cls is _Type else super().__instancecheck__(value)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is _Type else super().__subclasscheck__(kind)


class _Type(type, metaclass=_Meta):
    """``type`` in the files of the model."""


def _eager_type(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    if kind is SeenNode:
        return value.__class__
    return type(_IN_EAGER[kind]) if kind in _IN_EAGER else kind


def _isinstance(value: Any, kinds: Any, /) -> bool:
    if isinstance(value, kinds):
        return True
    kind = type(value)
    if kind in _IN_EAGER:
        return isinstance(_IN_EAGER[kind], kinds)
    if kind is FakeTensor:
        among = kinds if isinstance(kinds, tuple) else (kinds,)
        # The types of old, such as torch.FloatTensor, which a tensor says itself.
        return any(isinstance(k, _LEGACY) and value.type() == f"{k.__module__}.{k.__name__}" for k in among)
    return False
