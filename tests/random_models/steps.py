"""Steps that write values from values: arithmetic, submodules, numbers from nowhere, grad modes."""

from __future__ import annotations

from collections.abc import Callable

from random_models.program import VOCABULARY, WIDTH, Memory, Program, Submodule, Value

#: A step writes lines, chosen by three numbers; where it cannot apply it writes none.
Step = Callable[[Program, int, int, int], None]

#: Text, and what autograd keeps of it.
_UNARY = (
    ("torch.relu({x})", "out"), ("torch.tanh({x})", "out"), ("{x} * 0.5", ""), ("{x} + 1.0", ""), ("-{x}", ""),
    ("F.gelu({x})", "in"), ("{x}.sigmoid()", "out"), ("{x}.abs()", "in"), ("{x}.clone()", ""), ("F.silu({x})", "in"),
    ("torch.sin({x})", "in"), ("{x} / (1 + {x}.detach().square())", "in"), ("{x}.clamp(-1.5, 1.5)", "in"),
    ("F.leaky_relu({x}, 0.1)", "in"), ("F.softplus({x})", "in out"), ("1 - {x}", ""),
)  # fmt: skip
_BINARY = (
    ("{x} + {y}", ""), ("{x} * {y}", "in"), ("{x} - {y}", ""), ("torch.maximum({x}, {y})", "in"),
    ("torch.addcmul({x}, {y}, {y}, value=0.1)", "in"), ("torch.lerp({x}, {y}, 0.3)", ""),
    ("torch.where({x} > {y}, {x}, {y})", "in"), ("{x} / (2 + torch.tanh({y}))", "in"),
    ("torch.atan2({x}, 1 + {y}.abs())", "in"),
)  # fmt: skip


def unary(p: Program, a: int, b: int, c: int) -> None:
    x = p.floating(a)
    assert x is not None
    text, saves = _UNARY[b % len(_UNARY)]
    p.new(text.format(x=x.name), x.shape, [x], saves=saves)


def binary(p: Program, a: int, b: int, c: int) -> None:
    x = p.floating(a)
    assert x is not None
    y = p.pick(c, lambda v: v.dtype == "f" and v.shape in (x.shape, x.shape[-1:], ()))
    assert y is not None
    text, saves = _BINARY[b % len(_BINARY)]
    p.new(text.format(x=x.name, y=y.name), x.shape, [x, y], saves=saves)


def maybe_alias(p: Program, a: int, b: int, c: int) -> None:
    """Results that may be the very input."""
    x = p.floating(a)
    assert x is not None
    texts = (
        "F.dropout({x}, 0.3, self.training)",
        "{x}.contiguous()",
        "{x}.detach()",
        "{x}.to(x.dtype)",
        "{x}.view_as({x})",
    )
    text = texts[b % len(texts)].format(x=x.name)
    value = p.new(text, x.shape, [] if "detach" in text else [x], view_of=x, saves="")
    if "view_as" not in text and "contiguous" not in text:
        value.quiet = x.quiet


def _linear(p: Program, x: Value, c: int) -> Submodule:
    name, out = p.name("fc"), (WIDTH, x.last, 3)[c % 3]
    size = (out, x.last)
    p.init.append(f"self.{name} = nn.Linear({x.last}, {out}, bias={c % 5 != 0})")
    twin = next((m for m in p.submodules if m.weight == size), None)
    if twin is not None and c % 2:
        p.init.append(f"self.{name}.weight = self.{twin.name}.weight")
    return Submodule(name, lambda v: v.dtype == "f" and v.last == size[1], lambda v: (*v.shape[:-1], out), weight=size)


def _on_last(text: str) -> Callable[[Program, Value, int], Submodule]:
    def make(p: Program, x: Value, c: int) -> Submodule:
        name, size = p.name("m"), x.last
        p.init.append(f"self.{name} = " + text.format(n=size, persistent=c % 2 == 0, affine=c % 2 == 0))
        return Submodule(name, lambda v: v.dtype == "f" and v.last == size, lambda v: v.shape)

    return make


def _batch_norm(p: Program, x: Value, c: int) -> Submodule | None:
    if len(x.shape) not in (2, 3) or x.shape[0] != "B" or not isinstance(x.shape[1], int) or "B" in x.shape[1:]:
        return None
    name, shape = p.name("bn"), x.shape
    kind = "InstanceNorm1d" if len(shape) == 3 and c % 4 == 3 and shape[2] != 1 else "BatchNorm1d"
    momentum = (0.1, 0.3)[c % 2]
    p.init.append(
        f"self.{name} = nn.{kind}({shape[1]}, momentum={momentum}, affine={c % 3 != 2}, track_running_stats=True)"
    )
    return Submodule(name, lambda v: v.dtype == "f" and v.shape == shape, lambda v: v.shape)


def _convolution(p: Program, x: Value, c: int) -> Submodule | None:
    if len(x.shape) != 3 or x.shape[0] != "B" or "B" in x.shape[1:]:
        return None
    name, shape = p.name("conv"), x.shape
    p.init.append(f"self.{name} = nn.Conv1d({shape[1]}, 3, 3, padding=1)")
    return Submodule(name, lambda v: v.dtype == "f" and v.shape == shape, lambda v: (v.shape[0], 3, v.shape[2]))


def _sequence(p: Program, x: Value, c: int) -> Submodule | None:
    if len(x.shape) != 3 or x.shape[0] != "B" or x.last != WIDTH or "B" in x.shape[1:]:
        return None
    name, shape = p.name("seq"), x.shape
    made, call = (
        (f"nn.LSTM({WIDTH}, {WIDTH}, batch_first=True)", "self.{name}({x})[0]"),
        (f"nn.GRU({WIDTH}, {WIDTH}, batch_first=True)", "self.{name}({x})[0]"),
        (f"nn.MultiheadAttention({WIDTH}, 2, batch_first=True)", "self.{name}({x}, {x}, {x})[0]"),
        (f"nn.TransformerEncoderLayer({WIDTH}, 2, 8, 0.1, batch_first=True)", "self.{name}({x})"),
    )[c % 4]
    p.init.append(f"self.{name} = {made}")
    return Submodule(name, lambda v: v.dtype == "f" and v.shape == shape, lambda v: v.shape, call)


_MODULES: tuple[Callable[[Program, Value, int], Submodule | None], ...] = (
    _linear,
    _linear,
    _on_last("nn.LayerNorm({n}, elementwise_affine={affine})"),
    _batch_norm,
    _on_last("nn.Dropout(0.2)"),
    _on_last("nn.Sequential(nn.Linear({n}, 7), nn.Dropout(0.1, True), nn.ReLU(inplace=True), nn.Linear(7, {n}))"),
    _on_last("Average({n}, {persistent})"),
    _on_last("Gate({n})"),
    _convolution,
    _sequence,
    _on_last("nn.PReLU()"),
)  # fmt: skip


def submodule(p: Program, a: int, b: int, c: int) -> None:
    """A new submodule, called; some are frozen, some have a second name."""
    x = p.pick(a, lambda v: v.dtype == "f" and v.last > 0)
    assert x is not None
    made = _MODULES[b % len(_MODULES)](p, x, c)
    if made is None:
        return
    p.submodules.append(made)
    if c % 7 == 6:
        p.init.append(f"self.{made.name}.requires_grad_(False)")
    if c % 11 == 10:
        p.init.append(f"self.{made.name}_too = self.{made.name}")
    _call(p, made, x)


def again(p: Program, a: int, b: int, c: int) -> None:
    """A submodule that has been called already."""
    fitting = [(m, v) for m in reversed(p.submodules) for v in reversed(p.values) if m.fits(v)]
    if fitting:
        _call(p, *fitting[a % len(fitting)])


def _call(p: Program, module: Submodule, x: Value) -> None:
    text = module.call.format(name=module.name, x=x.name)
    if "Gate" in next(line for line in p.init if line.startswith(f"self.{module.name} =")):
        mask = p.pick(0, lambda v: v.dtype == "b" and v.shape == x.shape)
        text = text if mask is None else f"self.{module.name}({x.name}, mask={mask.name})"
    # Whether a frozen one passes a gradient on depends on its input; taking "yes" only forbids writes.
    parameter = Value("", (), "f", True, Memory())
    p.new(text, module.shape(x), [x, parameter], saves="in out")


def embedding(p: Program, a: int, b: int, c: int) -> None:
    ids = p.pick(a, lambda v: v.dtype == "i" and 0 < v.bound <= VOCABULARY)
    if ids is None:
        return
    name = p.name("emb")
    p.init.append(f"self.{name} = nn.Embedding({VOCABULARY}, {WIDTH}{', padding_idx=0' if c % 2 else ''})")
    module = Submodule(name, lambda v: v.dtype == "i" and 0 < v.bound <= VOCABULARY, lambda v: (*v.shape, WIDTH))
    p.submodules.append(module)
    _call(p, module, ids)


def tied_head(p: Program, a: int, b: int, c: int) -> None:
    """Scores against an embedding's own table."""
    tables = [m for m in p.submodules if m.name.startswith("emb")]
    x = p.pick(a, lambda v: v.dtype == "f" and v.last == WIDTH)
    if tables and x is not None:
        weight = Value("", (), "f", True, Memory())
        text = f"F.linear({x.name}, self.{tables[b % len(tables)].name}.weight)"
        p.new(text, (*x.shape[:-1], VOCABULARY), [x, weight], saves="in")


def parameter(p: Program, a: int, b: int, c: int) -> None:
    """A parameter of the model's own, read as it is or through a view."""
    x = p.pick(a, lambda v: v.dtype == "f" and v.last > 0)
    assert x is not None
    own = p.parameter((2, x.last), trainable=c % 4 != 3)
    views = ("{w}[0]", "{w}.sum(0)", "{w}.t()[:, 1]", "{w}[1:].view(-1)")
    text = ("{x} * {w}", "{x} + {w}")[c % 2].format(x=x.name, w=views[b % 4].format(w=own.name))
    p.new(text, x.shape, [x, own], saves="in")
    if c % 3 == 0:
        p.values.append(Value(f"{own.name}[1]", (x.last,), "f", own.grad, own.memory))


def reduction(p: Program, a: int, b: int, c: int) -> None:
    x = p.floating(a, dims=2)
    assert x is not None
    texts = (("mean", ""), ("sum", ""), ("amax", "in out"), ("logsumexp", "in out"), ("std", "in out"))
    name, saves = texts[b % len(texts)]
    dim = (-1, 1, 0)[c % 3]
    if name == "std" and x.shape[dim] == 1:
        return
    kept = [n for at, n in enumerate(x.shape) if at != dim % len(x.shape)]
    p.new(f"{x.name}.{name}({dim})", tuple(kept), [x], saves=saves)


def mixing(p: Program, a: int, b: int, c: int) -> None:
    """Products and joins of two values."""
    x = p.floating(a, dims=2)
    assert x is not None
    rest = x.shape[:-1]
    y = p.pick(c, lambda v: v.dtype == "f" and len(v.shape) == len(x.shape) and v.shape[:-1] == rest and v.last > 0)
    if y is None or not x.last:
        return
    kind = b % 5
    if kind == 0:
        p.new(f"torch.cat([{x.name}, {y.name}], -1)", (*rest, x.last + y.last), [x, y])
    elif kind == 1 and x.shape == y.shape:
        p.new(f"torch.stack([{x.name}, {y.name}]).mean(0)", x.shape, [x, y])
    elif kind == 2 and x.shape == y.shape:
        p.new(f"{x.name} @ {y.name}.transpose(-1, -2) * 0.3", (*rest, rest[-1]), [x, y], saves="in")
    elif kind == 3 and len(x.shape) == 3 and x.shape == y.shape:
        text = f"F.scaled_dot_product_attention({x.name}, {y.name}, {y.name}, is_causal={c % 2 == 0})"
        p.new(text, x.shape, [x, y], saves="in out")
    elif kind == 4:
        text = f"torch.einsum('...i,...j->...ij', {x.name}, {y.name}).amax(-1)"
        p.new(text, x.shape, [x, y], saves="in")


def integers(p: Program, a: int, b: int, c: int) -> None:
    """Integers and booleans, from values and from nothing."""
    ids = p.pick(a, lambda v: v.dtype == "i" and v.bound > 0)
    x, mask = p.floating(a), p.pick(c, lambda v: v.dtype == "b")
    assert ids is not None
    assert x is not None
    kind = b % 8
    if kind == 0:
        p.new(f"{x.name} > {('0', '0.3')[c % 2]}", x.shape, [x], dtype="b")
    elif kind == 1:
        p.new(f"{ids.name} > 3", ids.shape, [ids], dtype="b")
    elif kind == 2 and mask is not None:
        p.new(f"~{mask.name}", mask.shape, [mask], dtype="b")
    elif kind == 3 and mask is not None and mask.shape:
        p.new(f"{mask.name}.long().cumsum(-1)", mask.shape, [mask], dtype="i", bound=(mask.last or 9) + 1)
    elif kind == 4:
        p.new(f"({ids.name} * 2 + 1) % 7", ids.shape, [ids], dtype="i", bound=7)
    elif kind == 5 and x.last:
        p.new(f"{x.name}.argmax(-1)", x.shape[:-1], [x], dtype="i", bound=x.last)
    elif kind == 6:
        p.new(f"F.one_hot({ids.name}, {ids.bound}).to(x.dtype)", (*ids.shape, ids.bound), [ids])
    elif kind == 7 and x.last > 1:
        top, at = p.name(), p.name("at")
        p.emit(f"{top}, {at} = {x.name}.topk(2, -1)")
        p.known(top, (*x.shape[:-1], 2), [x], saves="in")
        p.known(at, (*x.shape[:-1], 2), [x], dtype="i", bound=x.last).memory.saved = True


def masking(p: Program, a: int, b: int, c: int) -> None:
    x, other = p.floating(a), p.floating(c)
    assert x is not None
    mask = p.pick(c, lambda v: v.dtype == "b" and v.shape == x.shape)
    if mask is None:
        mask = p.new(f"{x.name} > 0.1", x.shape, [x], dtype="b")
    same = other if other is not None and other.shape == x.shape else x
    texts = (
        f"{x.name}.masked_fill({mask.name}, 0.25)",
        f"torch.where({mask.name}, {x.name}, {same.name} * 2)",
        f"torch.where({mask.name}, {x.name}, {x.name}.detach())",
        f"{x.name} * {mask.name}",
    )
    p.new(texts[b % 4], x.shape, [x, same, mask], saves="in")


def size(p: Program, a: int, b: int, c: int) -> None:
    """Numbers that follow the batch size."""
    x = p.floating(a, dims=2)
    assert x is not None
    if x.shape[0] != "B":
        return
    texts = (
        "{x} / {x}.shape[0]",
        "{x} + torch.arange({x}.shape[0], device={x}.device).view("
        + ", ".join(["-1"] + ["1"] * (len(x.shape) - 1))
        + ")",
        "{x} * (1 + torch.ones({x}.shape, device={x}.device, dtype={x}.dtype)).log()",
        "{x} + {x}.numel() / 100",
        "{x}.flip(0) / (x.shape[0] + ids.shape[1])",
    )
    p.new(texts[b % len(texts)].format(x=x.name), x.shape, [x], saves="in")


def constant(p: Program, a: int, b: int, c: int) -> None:
    """What depends on nothing: made in forward, held as an attribute, written after it was made."""
    x = p.pick(a, lambda v: v.dtype == "f" and v.last > 0)
    assert x is not None
    n, kind = x.last, b % 6
    if kind == 0:
        p.new(f"torch.arange({n}, device=x.device).to(x.dtype)", (n,), [])
    elif kind == 1:
        p.new(f"torch.tensor({0.5 + c % 3}, device=x.device)", (), [])
    elif kind == 2:
        name = p.name("plain")
        p.init.append(f"self.{name} = torch.linspace(0.5, 1.5, {n})")
        p.new(f"{x.name} * self.{name}.to(x.device)", x.shape, [x])
    elif kind == 3:
        mask = p.new(f"torch.zeros({n}, device=x.device, dtype=x.dtype)", (n,), [])
        p.emit(f"{mask.name}[: {max(1, n // 2)}] = 1")
    elif kind == 4:
        p.new(f"torch.tril(torch.ones({n}, {n}, device=x.device, dtype=x.dtype))", (n, n), [])
    elif kind == 5:
        p.new(f"torch.full_like({x.name}, 0.3)", x.shape, [])


def noise(p: Program, a: int, b: int, c: int) -> None:
    x = p.pick(a, lambda v: v.dtype == "f" and v.last > 0)
    assert x is not None
    texts = (
        "{x} + torch.rand({n}, device=x.device)",
        "{x} + 0.1 * torch.randn_like({x})",
        "F.dropout({x}, 0.4, self.training)",
        "{x} * torch.bernoulli(torch.full_like({x}, 0.8))",
        "{x} * torch.empty({n}, device=x.device).uniform_(0.5, 1.5)",
        "F.dropout({x}, 0.4)",
        "{x} + torch.randint(0, 2, ({n},), device=x.device)",
        "F.rrelu({x}, training=self.training)",
    )
    p.new(texts[b % len(texts)].format(x=x.name, n=x.last), x.shape, [x], saves="in out")


def training_only(p: Program, a: int, b: int, c: int) -> None:
    x = p.floating(a)
    assert x is not None
    texts = ("{x} * 1.1 if self.training else {x}", "{x} + torch.rand_like({x}) if self.training else {x}")
    p.new(texts[b % 2].format(x=x.name), x.shape, [x], view_of=x).quiet = x.quiet


def grad_mode(p: Program, a: int, b: int, c: int) -> None:
    """``no_grad`` or ``enable_grad`` over the next steps."""
    if len(p.regions) < 2:
        mode = b % 3 == 2
        p.emit("with torch.enable_grad():" if mode else "with torch.no_grad():")
        p.regions.append((mode, 2 + c % 3))
        # The region must not be empty.
        x = p.floating(a)
        assert x is not None
        p.new(f"{x.name} * 1.5", x.shape, [x])


def cast(p: Program, a: int, b: int, c: int) -> None:
    """An autocast region of its own, perhaps with an island in full precision."""
    x = p.pick(a, lambda v: v.dtype == "f" and v.last > 0)
    assert x is not None
    first, second = _linear(p, x, 1), _linear(p, x, 1)
    h, n = p.name(), x.last
    p.casts = True
    p.emit("with torch.autocast(x.device.type, dtype=torch.bfloat16):")
    p.emit(f"    {h} = F.relu(self.{first.name}({x.name}), inplace={b % 2 == 0})")
    if c % 3 == 2:
        kept = p.name()
        p.emit("    with torch.no_grad():", f"        {kept} = {h}.sigmoid()", f"    {h} = {h} * {kept}")
    if c % 2:
        p.emit("    with torch.autocast(x.device.type, enabled=False):", f"        {h} = {h}.to(x.dtype).square()")
    p.emit(
        f"    {h} = self.{second.name}({h})"
        if b % 3
        else f"    {h} = {h} @ {h}.transpose(-1, -2) @ {h}"
        if len(x.shape) > 1
        else f"    {h} = {h} * 2"
    )
    if n and b % 5 == 4:
        p.emit(f"    {h} = {h}.float().softmax(-1)")
    p.new(f"{h}.to(x.dtype)", x.shape, [x, Value("", (), "f", True, Memory())], saves="in out")


def recomputed(p: Program, a: int, b: int, c: int) -> None:
    """Activation checkpointing around a submodule."""
    x = p.pick(a, lambda v: v.dtype == "f" and v.last > 0)
    assert x is not None
    module = _linear(p, x, 1)
    text = f"checkpoint(lambda t: torch.relu(self.{module.name}(t)) + t, {x.name}, use_reentrant=False)"
    p.new(text, x.shape, [x, Value("", (), "f", True, Memory())], saves="in out")


def optional(p: Program, a: int, b: int, c: int) -> None:
    """A branch on what is known when compiling."""
    x = p.floating(a, dims=2)
    assert x is not None
    texts = (
        f"{x.name} * 2 if {x.name}.shape[1] > 1 else {x.name} * 3",
        f"sum(({x.name} * i for i in range(1, 3)), torch.zeros_like({x.name}))",
        f"F.pad({x.name}, (1, 0))[..., :-1]",
        f"torch.roll({x.name}, 1, -1)",
    )
    p.new(texts[b % 4], x.shape, [x])


def refused(p: Program, a: int, b: int, c: int) -> None:
    """What a compiler cannot hold."""
    x = p.floating(a)
    assert x is not None
    if c % 8:
        return
    kind = b % 3
    p.refusable |= ({"HP111"}, {"HP114"}, {"HP117"})[kind]
    if kind == 0:
        p.new(f"{x.name} * 2 if {x.name}.sum() > 0 else {x.name} * 3", x.shape, [x])
    elif kind == 1:
        p.new(f"{x.name} * {x.name}.detach().mean().item()", x.shape, [x])
    else:
        own = p.parameter((WIDTH,))
        p.emit("with torch.no_grad():", f"    {own.name}.clamp_(-1, 1)")
        p.new(f"{x.name} * {own.name}.sum()", x.shape, [x, own], saves="in")
