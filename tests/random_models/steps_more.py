"""Steps of the rarer kinds: recurrent cells, containers, reparametrized weights, gathering, other dtypes, own modes."""

from __future__ import annotations

from random_models.program import CLASSES, WIDTH, Memory, Program, Shape, Value

#: A trained parameter, for values that a submodule makes.
_TRAINED = Value("", (), "f", True, Memory())

#: Text of what keeps the shape ``(*, n)``; ``{x}`` is not aliased.
_SAME_SHAPE = (
    "{x}.cumsum(-1)",
    "{x}.sort(-1)[0]",
    "{x}.flip(-1)",
    "F.normalize({x}, dim=-1)",
    "F.softmax({x}, -1)",
    "torch.cummax({x}, -1)[0]",
    "F.hardshrink({x}, 0.2)",
    "{x}.clone().index_fill_(-1, torch.tensor([0]), 0.5)",
    "torch.take_along_dim({x}, {x}.argsort(-1), -1)",
    "{x}.gather(-1, {x}.argsort(-1, descending=True))",
    "torch.zeros_like({x}).scatter_add(-1, {x}.argsort(-1), {x})",
    "{x}.nan_to_num(0.0)",
    "{x}.double().to(x.dtype) * 2",
    "{x}.index_select(-1, torch.arange({n}, device=x.device).flip(0))",
    "{x}.bfloat16().float().to(x.dtype)",
    "torch.view_as_real(torch.complex({x}, {x} * 0.5).exp()).sum(-1)",
    "torch.fft.rfft({x}, norm='ortho').abs().sum(-1, True) + {x}",
    "torch.stack([part * i for i, part in enumerate({x}.unbind(-1), 1)], -1)",
    "F.alpha_dropout({x}, 0.2, self.training)",
    "F.feature_alpha_dropout({x}, 0.2, self.training)",
    "torch.special.expit({x}).logit()",
    "{x}.index_add(-1, torch.arange(1, device=x.device), {x}[..., :1])",
    "{x}.masked_scatter({x} > 0, {x}.detach() * 2)",
    "torch.where({x} > 0, {x}, torch.tensor(0.1, dtype=x.dtype, device=x.device))",
    "{x} + torch.bucketize({x}, torch.linspace(-1, 1, 4, device=x.device, dtype=x.dtype))",
    "{x}.renorm(2, 0, 1.5)",
    "{x}.repeat_interleave(2, -1)[..., ::2] * 3",
)

#: Submodules on the last size, as `nn` text, with the call.
_ON_LAST = (
    ("nn.utils.parametrizations.weight_norm(nn.Linear({n}, {n}))", "self.{m}({x})"),
    ("nn.utils.parametrizations.spectral_norm(nn.Linear({n}, {n}))", "self.{m}({x})"),
    ("nn.utils.parametrizations.orthogonal(nn.Linear({n}, {n}))", "self.{m}({x})"),
    ("nn.RMSNorm({n})", "self.{m}({x})"),
    ("nn.Bilinear({n}, {n}, {n})", "self.{m}({x}, {x})"),
    ("Outputs({n})", 'self.{m}({x})["pair"][1]'),
    ("Outputs({n})", 'sum(self.{m}({x}, scale=2.0)["pair"])'),
    ("Counting({n})", "self.{m}({x})"),
    ("Teacher({n})", "self.{m}({x})"),
    ("nn.ModuleList(nn.Linear({n}, {n}) for _ in range(3))", "sum(layer({x}) for layer in self.{m})"),
    ("nn.ModuleDict({{'a': nn.Linear({n}, {n}), 'b': nn.Dropout(0.3)}})", "self.{m}['b'](self.{m}['a']({x}))"),
    ("nn.Sequential(*[nn.Linear({n}, {n})] * 2)", "self.{m}({x})"),
    ("nn.ParameterList([torch.randn({n}), torch.randn({n})])", "{x} * self.{m}[0] + self.{m}[1]"),
    ("Memory({n})", "self.{m}({x})"),
    ("Table({n})", "self.{m}({x})"),
)

#: What a three-dimensional value ``(B, t, WIDTH)`` goes through.
_SEQUENCES = (
    (
        "nn.LSTM({w}, {w}, 2, batch_first=True, dropout=0.2)",
        "(lambda o: o[0] + o[1][0].mean(0)[:, None] + o[1][1][-1][:, None])(self.{m}({x}))",
    ),
    ("nn.GRUCell({w}, {w})", "torch.stack(unrolled(self.{m}, {x}), 1)"),
    ("nn.MultiheadAttention({w}, 3, batch_first=True, dropout=0.1)", "self.{m}({x}, {x} * 2, {x})[0]"),
    ("nn.MultiheadAttention({w}, 2, batch_first=True)", "self.{m}({x}, {x}, {x})[1] @ {x}"),
    ("nn.TransformerDecoderLayer({w}, 2, 8, 0.1, batch_first=True)", "self.{m}({x}, {x}.flip(1))"),
    ("nn.RNN({w}, {w}, batch_first=True, bidirectional=True)", "self.{m}({x})[0][..., ::2]"),
    ("nn.Transformer({w}, 2, 1, 1, 8, 0.1, batch_first=True)", "self.{m}({x}, {x})"),
)

#: Image-like work on ``(B, c, t)``, with what comes out for ``t``.
_POOLS = (
    ("F.max_pool1d({x}, 2)", lambda t: t // 2),
    ("F.avg_pool1d({x}, 2, stride=1)", lambda t: t - 1),
    ("F.adaptive_avg_pool1d({x}, 2)", lambda _: 2),
    ("F.interpolate({x}, scale_factor=2, mode='nearest')", lambda t: 2 * t),
    ("F.pad({x}, (1, 1), mode='replicate')", lambda t: t + 2),
    ("F.max_pool1d({x}, 2, return_indices=True)[0]", lambda t: t // 2),
    ("F.dropout1d({x}, 0.3, self.training)", lambda t: t),
    ("{x}.unfold(-1, 2, 1).amax(-1)", lambda t: t - 1),
)

#: ``forward`` gives a buffer another tensor; a and b are buffers, h follows the batch, r are its rows.
_ASSIGNED = (
    "self.{a} = self.{a} * 0.5 + {r}.mean(0)",
    "self.{a}, self.{b} = self.{b}, self.{a}",
    "self.{b} = self.{a}; self.{a} = {r}.mean(0)",
    "self.{a} = torch.lerp(self.{a}, {r}.amax(0), 0.3) if self.training else self.{a}",
    "self.{a} += 1; self.{a} = self.{a} * self.{b}",
    "self.{a} = self.{a}.roll(1); self.{a}[0] = 0.25",
    "old = self.{a}; self.{a} = old + self.{b}; old *= 2",
)


def _x(p: Program, a: int, least: int = 1) -> Value | None:
    return p.pick(a, lambda v: v.dtype == "f" and v.last > least)


def same_shape(p: Program, a: int, b: int, c: int) -> None:
    x = _x(p, a)
    if x is not None:
        text = _SAME_SHAPE[(b + 16 * (c % 2)) % len(_SAME_SHAPE)]
        p.new(text.format(x=x.name, n=x.last), x.shape, [x], saves="in out")


def on_last(p: Program, a: int, b: int, c: int) -> None:
    x = _x(p, a)
    if x is None:
        return
    made, call = _ON_LAST[b % len(_ON_LAST)]
    name = p.name("w")
    p.init.append(f"self.{name} = " + made.format(n=x.last))
    if c % 5 == 4:
        p.init.append(f"self.{name}.requires_grad_(False)")
    text = call.format(m=name, x=x.name)
    result = p.new(text, x.shape, [x, _TRAINED], saves="in out")
    if c % 3 == 0:
        p.new(call.format(m=name, x=result.name), x.shape, [result, _TRAINED], saves="in out")


def sequence(p: Program, a: int, b: int, c: int) -> None:
    x = p.pick(a, lambda v: v.dtype == "f" and _is_sequence(v.shape) and v.last == WIDTH)
    if x is None:
        return
    made, call = _SEQUENCES[b % len(_SEQUENCES)]
    name = p.name("s")
    p.init.append(f"self.{name} = " + made.format(w=WIDTH))
    for _ in range(1 + (c % 4 == 3)):
        p.new(call.format(m=name, x=x.name), x.shape, [x, _TRAINED], saves="in out")


def _is_sequence(shape: Shape) -> bool:
    return len(shape) == 3 and shape[0] == "B" and "B" not in shape[1:]


def pool(p: Program, a: int, b: int, c: int) -> None:
    x = p.pick(a, lambda v: v.dtype == "f" and _is_sequence(v.shape) and v.last > 1)
    if x is not None:
        text, size = _POOLS[b % len(_POOLS)]
        p.new(text.format(x=x.name), (*x.shape[:-1], size(x.last)), [x], saves="in out")


def assigned(p: Program, a: int, b: int, c: int) -> None:
    """Buffers that get other tensors, read before or after by what autograd saves."""
    x = _x(p, a)
    if x is None or p.regions:
        return
    first, second, n = p.name("b"), p.name("b"), x.last
    for name in (first, second):
        p.init.append(f"self.register_buffer('{name}', torch.linspace(0.5, 1, {n}), persistent={c % 3 != 0})")
    text = _ASSIGNED[b % len(_ASSIGNED)].format(a=first, b=second, r=f"{x.name}.detach().reshape(-1, {n})")
    if c % 2:
        # What autograd has saved must not be written in place.
        by = "+" if "+=" in text or "*=" in text else "*"
        x = p.new(f"{x.name} {by} self.{first} + self.{second}", x.shape, [x], saves="in")
    p.emit(text)
    if c % 4 > 1 or not c % 2:
        p.new(f"{x.name} * self.{first} + self.{second}.sin()", x.shape, [x], saves="in")


def shared_buffer(p: Program, a: int, b: int, c: int) -> None:
    """One buffer under two names, read only."""
    x = _x(p, a)
    if x is None:
        return
    first, second = p.name("b"), p.name("b")
    p.init.append(f"self.register_buffer('{first}', torch.linspace(0.5, 1, {x.last}), persistent={b % 2 == 0})")
    p.init.append(f"self.register_buffer('{second}', self.{first}{('', '[:1]')[c % 2]})")
    p.new(f"{x.name} * self.{first}", x.shape, [x], saves="in")
    p.new(f"{x.name} + self.{second}", x.shape, [x])


def by_labels(p: Program, a: int, b: int, c: int) -> None:
    """What a model does with labels before its loss."""
    x = p.pick(a, lambda v: v.dtype == "f" and v.shape == ("B", v.last) and v.last > 0)
    if not p.nested or x is None:
        return
    name = p.name("emb")
    p.init.append(f"self.{name} = nn.Embedding({CLASSES}, {x.last})")
    p.new(f"{x.name} + self.{name}(labels) * (labels > 0).unsqueeze(-1)", x.shape, [x, _TRAINED], saves="in")


def indexed(p: Program, a: int, b: int, c: int) -> None:
    """Numbers taken or put where integers say."""
    x = p.pick(a, lambda v: v.dtype == "f" and v.shape == ("B", v.last) and v.last > 1)
    if x is None:
        return
    n, last = x.name, x.last
    texts: tuple[tuple[str, Shape], ...] = (
        (f"{n}.gather(1, ids % {last})", ("B", 4)),
        (f"{n}[torch.arange({n}.shape[0], device=x.device), ids[:, 0] % {last}]", ("B",)),
        (f"{n}[:, [0, {last - 1}]]", ("B", 2)),
        (f"{n}.scatter(1, ids[:, :1] % {last}, 0.5)", x.shape),
        (f"torch.zeros_like({n}).index_put((ids[:, 0] * 0, ids[:, 1] % {last}), {n}[:, 0], True)", x.shape),
        (f"F.embedding(ids % {last}, {n}.t().contiguous())[..., 0]", ("B", 4)),
        (f"torch.bmm({n}.unsqueeze(1), {n}.unsqueeze(2)).squeeze(-1)", ("B", 1)),
        (f"torch.cdist({n}.unsqueeze(0), {n}.unsqueeze(0) + 1).squeeze(0).mean(-1, keepdim=True)", ("B", 1)),
        (f"{n}.new_zeros({n}.shape[0], 4).scatter_add(1, ids % 4, ids.to(x.dtype)) * {n}.mean()", ("B", 4)),
    )
    text, shape = texts[b % len(texts)]
    p.new(text, shape, [x], saves="in out")
