"""A model as it is being written: its lines of Python, and what is known of each value at each line.

Steps (see `steps`) add lines. What they may do next depends on shapes, on which values share memory, and on what
autograd has saved, so that every finished program is one that plain PyTorch runs forward and backward.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from random_models.file_parts import DICT, HEADER, TUPLE

#: Sizes, all unlike, so that a mix-up shows; the batch size is ``"B"`` in shapes.
BATCH, WIDTH, LENGTH, VOCABULARY, CLASSES = 5, 6, 4, 11, 3

Shape = tuple[int | str, ...]


@dataclass(eq=False)
class Memory:
    """What several values may share.

    Attributes:
        saved: Autograd has saved it, so nothing may write into it any more.
        state: ``"parameter"``, ``"buffer"`` or ``""``.
    """

    saved: bool = False
    state: str = ""


@dataclass(eq=False)
class Value:
    """A name in ``forward``.

    Attributes:
        dtype: ``f``, ``i`` or ``b``.
        bound: Integers are below it and not negative; 0: not known.
        one_of: It is one of several views that one call returned.
        overlaps: Several of its numbers share a place in memory.
        quiet: It is a view made under ``no_grad``.
    """

    name: str
    shape: Shape
    dtype: str
    grad: bool
    memory: Memory
    bound: int = 0
    one_of: bool = False
    overlaps: bool = False
    quiet: bool = False

    @property
    def last(self) -> int:
        """The last size, if it is a number."""
        return self.shape[-1] if self.shape and isinstance(self.shape[-1], int) else 0


@dataclass(eq=False)
class Submodule:
    """A submodule that may be called again: ``fits(value)`` says on what, ``shape`` what comes out."""

    name: str
    fits: Callable[[Value], bool]
    shape: Callable[[Value], Shape]
    call: str = "self.{name}({x})"
    weight: tuple[int, int] | None = None
    saves: bool = True


@dataclass(eq=False)
class Program:
    """Lines so far.

    Attributes:
        nested: Whether the batch is a nested dict and the model returns its own loss in a dict.
        refusable: Codes of errors that the compiler may refuse this program with.
        regions: Grad modes that are open, with how many steps are left in each.
    """

    nested: bool = False
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    submodules: list[Submodule] = field(default_factory=list)
    refusable: set[str] = field(default_factory=set)
    regions: list[tuple[bool, int]] = field(default_factory=list)
    casts: bool = False
    _count: int = 0

    def __post_init__(self) -> None:
        self.values = [
            Value("x", ("B", WIDTH), "f", False, Memory()),
            Value("ids", ("B", LENGTH), "i", False, Memory(), bound=VOCABULARY),
        ]

    @property
    def with_grad(self) -> bool:
        return self.regions[-1][0] if self.regions else True

    def emit(self, *lines: str) -> None:
        self.body += ["    " * len(self.regions) + line for line in lines]

    def name(self, prefix: str = "h") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def pick(self, at: int, fits: Callable[[Value], bool]) -> Value | None:
        """A value that fits, the latest first."""
        fitting = [v for v in reversed(self.values) if fits(v)]
        return fitting[at % len(fitting)] if fitting else None

    def floating(self, at: int, dims: int = 0) -> Value | None:
        """A floating-point value with at least so many dimensions."""
        return self.pick(at, lambda v: v.dtype == "f" and len(v.shape) >= dims)

    def new(
        self,
        text: str,
        shape: Shape,
        reads: Iterable[Value],
        *,
        dtype: str = "f",
        view_of: Value | None = None,
        saves: str = "",
        **known: Any,
    ) -> Value:
        """Emit ``hN = text``. ``saves``: ``in`` and ``out`` are what autograd keeps."""
        value = self.known(self.name(), shape, reads, dtype=dtype, view_of=view_of, saves=saves, **known)
        self.emit(f"{value.name} = {text}")
        return value

    def known(
        self,
        name: str,
        shape: Shape,
        reads: Iterable[Value],
        *,
        dtype: str = "f",
        view_of: Value | None = None,
        saves: str = "",
        **known: Any,
    ) -> Value:
        """Note a value that some line has made."""
        reads = list(reads)
        grad = dtype == "f" and self.with_grad and any(v.grad for v in reads)
        value = Value(name, shape, dtype, grad, Memory(), **known)
        if view_of is not None:
            value.memory = view_of.memory
            value.one_of |= view_of.one_of
            value.overlaps |= view_of.overlaps
            value.quiet = view_of.quiet or not self.with_grad
            value.bound = value.bound or view_of.bound
        if grad:
            for read in reads if "in" in saves else ():
                read.memory.saved = True
            value.memory.saved |= "out" in saves
        self.values.append(value)
        return value

    def parameter(self, shape: tuple[int, ...], trainable: bool = True) -> Value:
        name = self.name("p")
        frozen = "" if trainable else ", requires_grad=False"
        self.init.append(f"self.{name} = nn.Parameter(torch.randn({shape}) * 0.5{frozen})")
        return Value(f"self.{name}", shape, "f", trainable, Memory(state="parameter"))

    def writable(self, value: Value, source: Value | None = None) -> Value:
        """The value itself if it may be written into here (with numbers of ``source``), else its copy."""
        sourced = self.with_grad and source is not None and source.grad
        free = not value.memory.saved and not value.overlaps and value.memory.state != "parameter"
        free = free and not (self.with_grad and (value.quiet or (value.one_of and (value.grad or sourced))))
        free = free and not (value.memory.state == "buffer" and sourced)
        if free:
            return value
        return self.new(f"{value.name}.clone()", value.shape, [value], dtype=value.dtype, bound=value.bound)

    def wrote(self, value: Value, *sources: Value, saves: str = "") -> None:
        """``value`` has been written into, with what ``sources`` hold."""
        if not self.with_grad:
            return
        if any(s.grad for s in (value, *sources)):
            for other in self.values:
                if other.memory is value.memory and other.dtype == "f":
                    other.grad = True
            for source in sources:
                source.memory.saved |= "in" in saves
            value.memory.saved |= "out" in saves

    def step_done(self) -> None:
        """One step less in each open region."""
        self.regions = [(mode, left - 1) for mode, left in self.regions]
        while self.regions and self.regions[-1][1] <= 0:
            self.regions.pop()

    def finish(self, terms: Iterable[int]) -> str:
        """The file of the model that ends here. ``terms``: values that have a part in the loss."""
        self.regions = []
        chosen = [self.floating(at) for at in terms]
        batched = self.pick(
            0, lambda v: v.dtype == "f" and len(v.shape) >= 2 and v.shape[0] == "B" and "B" not in v.shape[1:]
        )
        assert batched is not None
        size = 1
        for n in batched.shape[1:]:
            assert isinstance(n, int)
            size *= n
        self.init.append(f"self.head = nn.Linear({size}, {CLASSES})")
        self.emit(f"logits = self.head({batched.name}.flatten(1))")
        others = [v for v in dict.fromkeys(chosen) if v is not None]
        extra = "".join(f" + 0.1 * {v.name}.square().mean()" for v in others)
        if self.nested:
            self.emit(
                f"loss = F.cross_entropy(logits, labels){extra}",
                'return {"logits": logits, "none": None, "loss": loss}',
            )
            start = [
                "def forward(self, features, ids, labels, flag):",
                '    x, scale = features["x"], ids[1]',
                "    ids = ids[0]",
            ]
            start += ["    x = x * scale if flag else x"]
        else:
            self.emit(f"return logits{extra}" if extra else "return logits")
            start = ["def forward(self, x, ids):"]
        sizes = {"batch": BATCH, "width": WIDTH, "vocabulary": VOCABULARY, "length": LENGTH, "classes": CLASSES}
        forward = start + [f"    {line}" for line in self.body]
        return (
            HEADER
            + textwrap.indent("\n".join(self.init), "        ")
            + "\n\n"
            + textwrap.indent("\n".join(forward), "    ")
            + "\n"
            + (DICT if self.nested else TUPLE).format(**sizes)
        )
