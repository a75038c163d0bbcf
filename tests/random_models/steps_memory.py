"""Steps about memory: views, writes in place, buffers."""

from __future__ import annotations

from random_models.program import Memory, Program, Value


def view(p: Program, a: int, b: int, c: int) -> None:
    """Another shape of the same numbers."""
    x = p.pick(a, lambda v: len(v.shape) >= 2)
    assert x is not None
    n, shape, last = x.name, x.shape, x.last
    kind = b % 13

    def new(text: str, result: tuple[int | str, ...], **known: bool) -> None:
        p.new(text, result, [x], dtype=x.dtype, view_of=x, **known)

    if kind == 0:
        new(f"{n}.transpose(-1, -2)", (*shape[:-2], shape[-1], shape[-2]))
    elif kind == 1:
        new(f"{n}[:, 0]" if c % 2 else f"{n}[..., 0]", (shape[0], *shape[2:]) if c % 2 else shape[:-1])
    elif kind == 2 and last > 1:
        new(f"{n}[..., 1:]", (*shape[:-1], last - 1))
    elif kind == 3 and last % 2 == 0 and last:
        left, right = p.name(), p.name()
        p.emit(f"{left}, {right} = {n}.chunk(2, -1)")
        for name in (left, right):
            p.known(name, (*shape[:-1], last // 2), [x], dtype=x.dtype, view_of=x, one_of=True)
    elif kind == 4:
        new(f"{n}.unsqueeze(1)", (shape[0], 1, *shape[1:]))
    elif kind == 5 and last:
        new(f"{n}[..., :1].expand_as({n})", shape, overlaps=True)
    elif kind == 6 and last % 2 == 0 and last:
        new(f"{n}.unflatten(-1, (2, {last // 2}))", (*shape[:-1], 2, last // 2))
    elif kind == 7 and len(shape) == 3 and last and isinstance(shape[1], int):
        new(f"{n}.flatten(1)" if c % 2 else f"{n}.reshape({n}.shape[0], -1)", (shape[0], shape[1] * last))
    elif kind == 8 and len(shape) == 3:
        new(f"{n}.permute(2, 0, 1)", (shape[2], shape[0], shape[1]))
    elif kind == 9 and last > 2:
        one, two = p.name(), p.name()
        p.emit(f"{one}, {two} = {n}.split([1, {last - 1}], -1)")
        p.known(one, (*shape[:-1], 1), [x], dtype=x.dtype, view_of=x, one_of=True)
        p.known(two, (*shape[:-1], last - 1), [x], dtype=x.dtype, view_of=x, one_of=True)
    elif kind == 10 and isinstance(shape[1], int):
        parts, name = p.name("parts"), p.name()
        p.emit(f"{parts} = {n}.unbind(1)")
        p.emit(f"{name} = {parts}[{c % shape[1]}]")
        p.known(name, (shape[0], *shape[2:]), [x], dtype=x.dtype, view_of=x, one_of=True)
    elif kind == 11 and isinstance(shape[1], int):
        new(f"{n}.narrow(1, 0, {max(1, shape[1] - 1)})", (shape[0], max(1, shape[1] - 1), *shape[2:]))
    elif kind == 12:
        new(f"{n}.view({n}.shape[0], 1, -1).squeeze(1)" if len(shape) == 2 and x.memory.state else f"{n}[:]", shape)


#: Text, and what autograd keeps of it.
_UNARY = (
    ("{x}.relu_()", "out"), ("{x}.mul_(0.5)", ""), ("{x}.add_(1.0)", ""), ("{x} += 0.5", ""), ("{x}.tanh_()", "out"),
    ("{x}.clamp_(-1, 1)", "out"), ("{x}.neg_()", ""), ("F.relu({x}, inplace=True)", "out"), ("{x}.sigmoid_()", "out"),
    ("F.dropout({x}, 0.2, self.training, inplace=True)", ""), ("{x}.mul_(2).sub_(1)", ""), ("{x} *= 0.9", ""),
    ("{x}.zero_()", ""), ("F.silu({x}, inplace=True)", "out"), ("{x}.fill_(0.5)", ""),
    ("nn.ReLU(inplace=True)({x})", "out"),
)  # fmt: skip
_BINARY = (
    ("{x}.add_({y})", ""), ("{x} += {y}", ""), ("{x}.mul_({y})", "in out"), ("{x}.sub_({y}, alpha=0.5)", ""),
    ("{x}.copy_({y})", ""), ("{x}.addcmul_({y}, {y}, value=0.1)", "in"), ("{x}[:] = {y}", ""),
    ("{x}.lerp_({y}, 0.2)", ""),
)  # fmt: skip
#: Writes into a part.
_PARTS = (
    "{x}[:, 0] = 0", "{x}[..., 0] += 1.0", "{x}[:, :1].mul_(0.5)", "{x}[0].zero_()", "{x}[..., -1].fill_(0.2)",
    "{x}[{x}.detach() > 1] = 0.5", "{x}.masked_fill_({x}.detach() < -1, -0.5)", "{x}.select(1, 0).neg_()",
    "{x}.transpose(0, 1)[0] = 1", "{x}[:, -1] = {x}[:, 0].clone()", "{x}.flatten()[0] *= 1",
    "{x}[:, :1], {x}[:, -1:] = {x}[:, -1:].clone(), {x}[:, :1].clone()",
)  # fmt: skip


def write(p: Program, a: int, b: int, c: int) -> None:
    """In place, with nothing else; the result is read by its old name, by a new one, or never."""
    x = p.floating(a)
    assert x is not None
    x = p.writable(x)
    text, saves = _UNARY[b % len(_UNARY)]
    _emit(p, x, text.format(x=x.name), saves, (), c)


def write_value(p: Program, a: int, b: int, c: int) -> None:
    """In place, with another value."""
    x = p.floating(a)
    assert x is not None
    y = p.pick(c, lambda v: v.dtype == "f" and v.shape in (x.shape, x.shape[-1:], ()) and v.memory is not x.memory)
    if y is None:
        return
    x = p.writable(x, y)
    text, saves = _BINARY[b % len(_BINARY)]
    _emit(p, x, text.format(x=x.name, y=y.name), saves, (y,), c)


def _emit(p: Program, x: Value, text: str, saves: str, sources: tuple[Value, ...], c: int) -> None:
    is_statement = "=" in text.replace("inplace=", "").replace("value=", "").replace("alpha=", "")
    if x.name.startswith("self.") and is_statement and "[" not in text.split("=")[0]:
        return  # `self.b += 1` assigns the attribute
    if c % 3 == 1 and not is_statement:
        again = p.new(text, x.shape, [x, *sources], view_of=x)
        again.quiet = x.quiet
    else:
        p.emit(text)
    p.wrote(x, *sources, saves=saves)


def write_part(p: Program, a: int, b: int, c: int) -> None:
    x = p.floating(a, dims=2)
    assert x is not None
    if x.shape[1] == "B" or not x.last:
        return
    x = p.writable(x)
    text = _PARTS[b % len(_PARTS)]
    if p.with_grad and x.grad and "clone" in text:
        text = _PARTS[0]
    p.emit(text.format(x=x.name))
    p.wrote(x)


def write_integers(p: Program, a: int, b: int, c: int) -> None:
    x = p.pick(a, lambda v: v.dtype in "ib" and len(v.shape) >= 1)
    assert x is not None
    x = p.writable(x)
    texts = (
        ("{x}[..., 0] = 1", "{x}.clamp_(max=2)", "{x}.zero_()")
        if x.dtype == "i"
        else ("{x}[..., 0] = True", "{x}.logical_not_()", "{x} &= False")
    )
    p.emit(texts[b % 3].format(x=x.name))
    if x.dtype == "i" and x.bound:
        x.bound = max(x.bound, 3)


def buffer(p: Program, a: int, b: int, c: int) -> None:
    """A buffer that is read, and perhaps written before or after."""
    x = p.pick(a, lambda v: v.dtype == "f" and v.last > 0)
    assert x is not None
    name, n = p.name("b"), x.last
    p.init.append(f"self.register_buffer('{name}', torch.linspace(0.5, 1, {n}), persistent={c % 3 != 0})")
    rows = f"{x.name}.detach().reshape(-1, {n})"
    writes = (
        (),
        (f"self.{name}.mul_(0.9).add_({rows}.mean(0), alpha=0.1)",),
        (f"self.{name}.copy_({rows}.amax(0))",),
        (f"self.{name} = self.{name} * 0.5",),
        (f"self.{name}[0] = {rows}.mean()",),
        ("with torch.no_grad():", f"    self.{name} += {rows}.mean(0)"),
        ("if self.training:", f"    self.{name}.add_(1.0)"),
        (f"self.{name}.view(1, -1)[0, -1] *= 2",),
    )[b % 8]
    if c % 2:
        p.emit(*writes)
    p.new(f"{x.name} + self.{name}" if writes else f"{x.name} * self.{name}", x.shape, [x])
    if not c % 2:
        p.emit(*writes)
    if c % 5 == 4:
        p.values.append(Value(f"self.{name}", (n,), "f", False, Memory(state="buffer")))
