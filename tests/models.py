"""Small models with the traits that break partitioners, each a workload: settings ``{"name": "TiedLM"}``.

The kinds are those of public issues around splitting models. All are tiny, and none of them needs data.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from hetpipe_compiler import Workload

BATCH, WIDTH, CLASSES, VOCABULARY, LENGTH = 4, 8, 5, 17, 6


@dataclass(frozen=True)
class Kind:
    """A model with its example; ``loss=None``: it returns its own."""

    model: Callable[[], nn.Module]
    example: Callable[[], Any]
    loss: Any = None
    targets: Any = 1


def vectors() -> tuple[Tensor, Tensor]:
    """Features and class labels."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def images() -> tuple[Tensor, Tensor]:
    """3 x 8 x 8 images and labels."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, 3, 8, 8, generator=generator)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def tokens() -> tuple[Tensor, Tensor]:
    """Token ids and the next ones."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    return ids, ids.roll(-1, 1)


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class TiedLM(nn.Module):
    """The head is the embedding, and two blocks share a projection registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "proj": nn.Linear(WIDTH, WIDTH)})
        self.second = nn.ModuleDict({"proj": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)})
        self.second.proj.weight = self.first.proj.weight
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = h + torch.tanh(self.first.proj(self.first.norm(h)))
        h = h + torch.tanh(self.second.proj(self.second.norm(h)))
        return self.head(h)


class SkipOver(nn.Module):
    """The embedding's output is needed at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        e = self.embed(ids)
        return self.head(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(e)))))) + e)


class RoPEDecoder(nn.Module):
    """Tables in buffers that are not saved, read in every block, and a causal mask made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        angles = torch.arange(LENGTH)[:, None] / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.embed(ids)
        if mask is None:
            mask = torch.full((ids.shape[1], ids.shape[1]), -1e9, device=ids.device).triu_(1)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(h).chunk(3, -1)
            scores = self.rotate(q) @ self.rotate(k).transpose(1, 2) / math.sqrt(WIDTH) + mask
            h = h + out(scores.softmax(-1) @ v)
        return self.head(h)


class BNConvNet(nn.Module):
    """Batch norm in train mode, after a convolution and after a linear layer; residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6, momentum=0.3)
        self.fc = nn.Linear(6, WIDTH)
        self.bn3 = nn.BatchNorm1d(WIDTH, affine=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = F.relu(self.bn2(self.conv2(h)) + h)
        return self.head(self.bn3(self.fc(F.adaptive_avg_pool2d(h, 1).flatten(1))))


class InplaceNet(nn.Module):
    """In-place operators in all positions: results unused, views alive, slices, masks, values read before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.act(h)
        row = h[0]
        h = h * row
        h[:, 0] = 0
        g = self.b(h).clone()
        side = -g
        g += self.c(x)
        g.mul_(2).sub_(side)
        flat = g.view(-1)
        g[g.detach() > 1] = 0.5
        h = h + flat.view(BATCH, WIDTH)
        h.clamp_(-3, 3).div_(2)
        gates = self.c(h)
        gates[:, 2:4].mul_(0.5)
        return self.head(gates.tanh_())


class CompareInplace(nn.Module):
    """``gt_`` keeps floating point where ``gt`` gives booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        m = h.detach().clone()
        m.gt_(0)
        return self.head(h * (m.mean() + m))


class MaskedInt(nn.Module):
    """Integers and booleans cross the cut, and a branch gives a value no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.fc, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids > 3
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        h = self.fc(self.embed(ids))
        h = h.masked_fill(~mask[..., None], 0) + self.place(positions)
        return self.head(torch.where(mask[..., None], h, h.detach()))


class NestedIO(nn.Module):
    """Dicts and tuples with None between its parts; a target that only the end reads; loss in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def encode(self, x: dict[str, Any]) -> tuple[Tensor, None, dict[str, Tensor]]:
        h = torch.tanh(self.enc(x["features"]))
        return h, None, {"aux": h.square().mean()}

    def forward(self, x: dict[str, Any], labels: Tensor, flag: bool, scale: float) -> dict[str, Any]:
        h, nothing, extra = self.encode(x)
        assert nothing is None
        logits = self.head(torch.tanh(self.dec(h)) * (scale if flag else 1.0))
        loss = F.cross_entropy(logits, labels, weight=x["weights"][0]) + 0.1 * extra["aux"]
        return {"logits": logits, "none": x["nothing"], "loss": loss}


def nested() -> dict[str, Any]:
    x, y = vectors()
    weights = [torch.linspace(0.5, 1, CLASSES), None]
    return {"x": {"features": x, "nothing": None, "weights": weights}, "labels": y, "flag": True, "scale": 0.5}


@dataclass
class Mask:
    """An object in the batch."""

    keep: Tensor
    scale: float = 2.0


torch.export.register_dataclass(Mask)


class ObjectInBatch(nn.Module):
    """Its mask is an object with a tensor inside, which the last layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return self.head(torch.tanh(self.a(x)) * mask.keep * mask.scale)


def object_in_batch() -> dict[str, Any]:
    x, y = vectors()
    return {"x": x, "mask": Mask((x > 0).to(x.dtype)), "labels": y}


class FrozenLoRA(nn.Module):
    """A frozen base; adapters train only in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.base[0](x))
        h = torch.relu(self.base[1](h) + h @ self.down.T @ self.up.T)
        return self.head(torch.relu(self.base[2](h)))


class UnusedEven(nn.Module):
    """Parameters that nothing reads, and one whose result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.never = nn.Parameter(torch.zeros(3))
        self.register_buffer("idle", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            h = layer(x)
            if at % 2:
                x = x + torch.relu(h)
        return self.head(x)


class MixedDtype(nn.Module):
    """bfloat16 in the middle, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.b = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(torch.relu(self.a(x)).to(torch.bfloat16)).relu().float())


class Autocast(nn.Module):
    """Autocast over the middle, with an island in full precision, on the device of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = F.relu(self.b(h), inplace=True)
            with torch.autocast(x.device.type, enabled=False):
                s = h.float().square().mean(-1, keepdim=True)
            h = self.c(h * s.to(h.dtype))
        return self.head(h.float())


class NoGrad(nn.Module):
    """A frozen front under no_grad (with in-place operators), and a moving average kept there."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.front(x)
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.count += 1
            with torch.enable_grad():
                g = torch.sin(self.body(h))
        h = torch.relu(g) - self.average
        with torch.no_grad():
            h2 = h * 2
        return self.head(h + h2)


class BranchyDAG(nn.Module):
    """Many residual blocks with a wide fan-in at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            kept.append(x)
        return self.head(sum(kept[::3]) + torch.stack(kept).mean(0))


class OptionalArgs(nn.Module):
    """An argument that stays None, and one by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.a(x))
        if mask is not None:
            h = h * mask
        return self.head(h if scale is None else h * scale)


class ConstInForward(nn.Module):
    """Constants of all origins: numbers, tensors made in forward or held as attributes, buffers computed early."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.plain = torch.linspace(0.5, 1.5, WIDTH)
        self.listed = [torch.tensor([2.0]), torch.tensor(3.0)]
        self.register_buffer("table", torch.arange(WIDTH).float().sqrt())

    def forward(self, x: Tensor) -> Tensor:
        one = torch.tensor(1.5, device=x.device)
        h = self.a(x) * one + torch.arange(WIDTH, device=x.device) * self.plain.to(x.device)
        mask = torch.zeros(WIDTH, device=x.device)
        mask[: WIDTH // 2] = 1
        late = mask * 2 + 1
        h = self.b(h * mask) + self.table * self.listed[0].to(x.device) + torch.tensor(2.0)
        h = h * torch.tensor([1.0, -1.0] * (WIDTH // 2), device=x.device)
        return self.head(torch.tanh(h) * late)


class RandomInForward(nn.Module):
    """Noise made in forward, used twice or never, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(WIDTH, device=x.device)
        h = self.a(x) + noise
        torch.rand(2)
        h = F.dropout(h, 0.5, self.training, inplace=True)
        h = F.dropout(self.b(h) + 0.1 * torch.randn_like(h), 0.3, self.training)
        return self.head(h * noise)


class Identity(nn.Module):
    """Next to nothing: fewer operators than stages."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002
        return self.scale * x.mean()


class NoInputFirst(nn.Module):
    """The first blocks read parameters only; the batch comes in at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.tanh(self.mix(self.codes + torch.arange(WIDTH, device=self.codes.device)))
        codes = codes / codes.norm(dim=1, keepdim=True)
        return x @ codes.T


class Recurrent(nn.Module):
    """An LSTM and a GRU cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        h, _ = self.lstm(self.embed(ids))
        state, states = torch.zeros(ids.shape[0], WIDTH, device=h.device, dtype=h.dtype), []
        for step in h.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return self.head(torch.stack(states, 1))


class EncoderDecoder(nn.Module):
    """``nn.Transformer``: the encoder's output is read by every decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        padding = source == 0
        h = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=mask, src_key_padding_mask=padding, tgt_is_causal=True
        )
        return self.head(h)


class CalledTwice(nn.Module):
    """A layer and a batch norm (without a counter, which would tie its calls) that run twice, and one module under two
    names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.bn.num_batches_tracked = None
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = self.left
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn(self.fc(x)))
        h = torch.tanh(self.left(h))
        h = torch.relu(self.bn(self.fc(h)))
        return self.head(self.right(h))


class BufferWrites(nn.Module):
    """Buffers written through views, by assignment and by copy, and read again after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("slots", torch.zeros(3, WIDTH))
        self.register_buffer("assigned", torch.ones(WIDTH))
        self.register_buffer("copied", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.slots[0] = h.detach().mean(0)
        self.assigned = self.assigned * 0.5
        h = self.b(torch.relu(h + self.slots.sum(0))) * self.assigned
        self.copied.copy_(h.detach().amax(0))
        return self.head(h - self.copied)


class WritesBatch(nn.Module):
    """Writes into its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        x[:, 0] = 0
        x[x > 1] = 1
        h = torch.tanh(self.a(h))
        return self.head(h + x)


class Parametrized(nn.Module):
    """Weight norm old and new, orthogonal and spectral parametrization, ParameterList and ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.new = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.listed = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1.0 + i)) for i in range(2))
        self.named = nn.ParameterDict({"one": nn.Parameter(torch.ones(WIDTH)), "a-b": nn.Parameter(torch.ones(WIDTH))})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.new(x) * self.listed[0] + self.named["one"])
        return self.head(torch.tanh(self.spectral(h) * self.listed[1]) * self.named["a-b"])


class OldWeightNorm(nn.Module):
    """``torch.nn.utils.weight_norm`` sets a plain attribute before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x)))


class LazyCache(nn.Module):
    """Makes a table at its first call and keeps it: the next call computes the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.table: Tensor | None = None
        self.known = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.known < x.shape[1]:
            self.table = torch.arange(x.shape[1], device=x.device).float()
            self.known = x.shape[1]
        return self.head(torch.tanh(self.a(x) + self.table))


class KeepsForPeople(nn.Module):
    """Leaves its attention where people can look at it; nothing reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attention: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.attention = (self.a(x) @ x.T).softmax(-1)
        return self.head(self.attention @ x)


class FixedBatch(nn.Module):
    """Turns the batch size into a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.per_row = nn.Parameter(torch.ones(BATCH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.a(x)) * self.per_row)


class SizesCross(nn.Module):
    """Numbers that follow the batch size are used far from where they arise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        h = torch.relu(self.a(x)).view(rows * 2, WIDTH // 2)
        h = self.b(h.view(rows, WIDTH)) / rows + torch.ones(rows, 1, device=x.device).cumsum(0) / (rows // 2 + 1)
        return self.head(h.reshape(-1, WIDTH)) * math.sqrt(WIDTH)


class Layouts(nn.Module):
    """Values that cross as views: transposed, expanded, strided; and a reading of memory as it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        t = h.t()
        s = t.as_strided((WIDTH, BATCH), (1, WIDTH))
        e = h[:1].expand(BATCH, WIDTH)
        u = torch.relu(h).unfold(1, 2, 2).reshape(BATCH, WIDTH)
        return self.head(torch.tanh(t.t() + s.t() + e + u[:, ::2].repeat(1, 2)))


class Checkpointed(nn.Module):
    """Activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(
            lambda t: torch.relu(self.b(torch.relu(self.a(t)))), x, use_reentrant=False
        )
        return self.head(h)


class Reentrant(nn.Module):
    """Checkpointing of the old kind: no gradient for what it wraps where its input wants none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(lambda t: torch.relu(self.a(t)), x, use_reentrant=True)
        h = torch.utils.checkpoint.checkpoint(lambda t: torch.relu(self.b(t)), self.c(h), use_reentrant=True)
        return self.head(h)


class SavesMemory(torch.autograd.Function):
    """A backward of its own that is the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.tanh(x * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * ctx.scale * (1 - torch.tanh(x * ctx.scale).square()), None


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(SavesMemory.apply(self.a(x), 2))


class MaskedSoftmax(torch.autograd.Function):
    """Writes into what softmax has saved, and brings the backward that goes with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        y = x.masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-1).masked_fill_(~mask, 0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(-1, keepdim=True)), None


class OwnSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(MaskedSoftmax.apply(self.a(x), x > 0))


class Inference(nn.Module):
    """A frozen front under ``inference_mode``."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            h = torch.relu(self.front(x))
        return self.head(torch.tanh(self.a(h.clone())))


class QuietWrite(nn.Module):
    """Written under ``no_grad``, where it keeps its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + 1
        with torch.no_grad():
            h.mul_(0.5)
        return self.head(h + x)


class ReadsData(nn.Module):
    """``data`` of activations, parameters and buffers, read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("count", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.data.clamp_(-0.3, 0.3)
        self.count.data.add_(1)
        return self.head(self.b(h) + h.data * 2 + F.linear(x, self.a.weight.data) / self.count.data)


class FilledByParts(nn.Module):
    """Values made without a gradient, and views of them, that have one once something is written into them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.new_zeros(x.shape[0], 2 * WIDTH)
        left = parts[:, :WIDTH]
        kept = parts.detach()
        parts[:, :WIDTH] = self.a(x)
        parts[:, WIDTH:] = torch.tanh(self.b(x))
        moved = x + 1
        moved[:] = left * 2
        scale = moved.square().mean() * 0.1
        return self.head(parts[:, 2 : WIDTH + 2] + left + kept[:, :WIDTH]) + scale


class LerpInplace(nn.Module):
    """Export's fake tensors cannot try its functional twin at a free batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 2
        h.lerp_(self.a.bias, 0.2)
        return self.head(h)


class CopiedOver(nn.Module):
    """``copy_`` onto whole values: its functional twin has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, empty = self.a(x) + x, x + 1
        h.copy_(torch.relu(self.b(x)))
        empty.copy_(h[:1])
        return self.head(h * empty)


class OddNames(nn.Module):
    """Names that stages use themselves, for inputs, targets and buffers; and a module reached through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.b.weight = self.a.weight
        self.b_b, self.b.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.plain = torch.full((WIDTH,), 2.0)
        self.register_buffer("constant_plain", torch.full((WIDTH,), 3.0))
        self.register_buffer("moving", torch.zeros(WIDTH))
        self.listed = [self.b, self.moving]

    def forward(self, math: Tensor, shared_a_weight: Tensor) -> Tensor:
        h = torch.relu(self.a(math)).view(math.shape[0] * 2, -1) / math.shape[0] ** 0.5
        h = self.listed[0](h.view(-1, WIDTH)) * shared_a_weight + self.plain
        h = h + self.b.b(torch.tanh(self.b_b(h)))
        self.moving.add_(h.detach().mean(0))
        h = h - self.listed[1]
        h = self.b_b(h) + self.b.b(h)
        return self.head(h * self.constant_plain)


def odd_names() -> dict[str, Any]:
    x, y = vectors()
    return {"math": x, "shared_a_weight": x.flip(0), "nn": y}


class DropPath(nn.Module):
    """Residual branches that training leaves out at random, per sample, and dropout around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(F.dropout(x, 0.2, self.training)))
            if self.training:
                h = h.div(0.8) * torch.empty(x.shape[0], 1, device=x.device).bernoulli_(0.8)
            x = x + h
        return self.head(x)


class AuxiliaryHead(nn.Module):
    """A second head that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.side, self.head = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        side = self.side(h) if self.training else None
        loss = F.cross_entropy(self.head(torch.relu(self.b(h))), labels)
        return loss if side is None else loss + 0.3 * F.cross_entropy(side, labels)


class LossWithState(nn.Module):
    """A loss with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1, CLASSES))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, weight=self.weights)


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def keyword() -> dict[str, Any]:
    x, y = vectors()
    return {"x": x, "mask": None, "scale": torch.full((WIDTH,), 2.0), "labels": y}


def big_vocabulary() -> nn.Module:
    return nn.Sequential(nn.Embedding(4096, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4096))


class Search(nn.Module):
    """Walks its layers until the values are small enough, and counts its steps: export cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.scale = torch.tensor(0.5)

    def forward(self, h: Tensor, options: dict[str, Any], limit: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
        h = self.norm(h)
        for layer in self.layers:
            if float(h.detach().norm()) <= limit:
                break
            h = torch.tanh(layer(h)) * self.scale * options["gain"]
            self.steps += 1
        if float(h.detach().sum()) > 1e6:
            h = h.relu()
        return h, {"mean": h.mean(1), "none": None, "rows": h.shape[0]}


class KeptWhole(nn.Module):
    """A submodule that only ``--opaque`` takes; one of its weights is used outside too, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.search = Search()
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.search.layers[0].weight
        self.search.layers[1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.search(torch.relu_(self.a(x)), {"gain": 1.5}, limit=0.1)
        h = torch.tanh(self.b(h)) + other["mean"].unsqueeze(1) / other["rows"]
        return self.head(h.relu_())


class Halve(nn.Module):
    """Drops numbers and halves until they are small, which may be at once: then it returns what it was given."""

    def forward(self, h: Tensor, *, limit: float) -> Tensor:
        while float(h.detach().abs().max()) > limit:
            h = F.dropout(h, 0.1, self.training) / 2
        return h


class KeptWholeTwice(nn.Module):
    """One module of ``--opaque`` called twice, and one whose results are written into while others read them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.halve = nn.ModuleList([Halve(), Halve()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for layer in self.layers:
            h = layer(self.halve[0](h.tanh(), limit=0.2))
        same = self.halve[1](h, limit=10.0)
        same.mul_(3.0)
        with torch.no_grad():
            quiet = self.halve[1](h, limit=0.1)
        return self.head(h + same + quiet)


class OneOrZero(torch.autograd.Function):
    """A step whose backward is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient


class Binary(nn.Module):
    """Its gradient is its own invention, twice over."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda _module, gradients, _: (gradients[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        return OneOrZero.apply(x)


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.binary, self.head = nn.Linear(WIDTH, WIDTH), Binary(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.binary(self.a(x)))


class AtTimes(nn.Module):
    """Uses its layer on batches with a positive sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(h)) if float(x.detach().sum()) > 0 else h * 1


class UsedAtTimes(nn.Module):
    """Parameters without a gradient on some minibatches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.part, self.head = nn.Linear(WIDTH, WIDTH), AtTimes(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(torch.relu(self.a(x)), x))


def positive() -> tuple[Tensor, Tensor]:
    x, y = vectors()
    return x.abs(), y


#: ``--opaque`` of the kinds that need it.
OPAQUE = {
    "KeptWhole": ("search",), "KeptWholeTwice": ("halve.*",), "OwnBackward": ("binary",), "UsedAtTimes": ("part",),
}  # fmt: skip


def _lm(model: Callable[[], nn.Module]) -> Kind:
    return Kind(model, tokens, token_loss)


def _classifier(model: Callable[[], nn.Module]) -> Kind:
    return Kind(model, vectors, nn.CrossEntropyLoss())


KINDS: dict[str, Kind] = {
    **{m.__name__: _lm(m) for m in (TiedLM, SkipOver, RoPEDecoder, MaskedInt, Recurrent)},
    **{
        m.__name__: _classifier(m)
        for m in (
            InplaceNet, CompareInplace, FrozenLoRA, UnusedEven, MixedDtype, Autocast, NoGrad, BranchyDAG, OptionalArgs,
            ConstInForward, RandomInForward, NoInputFirst, CalledTwice, BufferWrites, WritesBatch, Parametrized,
            DropPath, OldWeightNorm, LazyCache, KeepsForPeople, FixedBatch, SizesCross, Layouts, Checkpointed,
            Reentrant, OwnFunction, OwnSoftmax, Inference, QuietWrite, ReadsData, FilledByParts, LerpInplace,
            CopiedOver,
            KeptWhole, KeptWholeTwice, OwnBackward,
        )
    },
    "BNConvNet": Kind(BNConvNet, images, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "NestedIO": Kind(NestedIO, nested, None, 0),
    "OptionalKeywords": Kind(OptionalArgs, keyword, nn.CrossEntropyLoss(), ["labels"]),
    "ObjectInBatch": Kind(ObjectInBatch, object_in_batch, nn.CrossEntropyLoss(), ["labels"]),
    "OddNames": Kind(OddNames, odd_names, nn.CrossEntropyLoss(), ["nn"]),
    "BigVocab": Kind(big_vocabulary, tokens, token_loss),
    "Identity": Kind(Identity, vectors, None),
    "AuxiliaryHead": Kind(AuxiliaryHead, vectors, None),
    "EncoderDecoder": Kind(EncoderDecoder, lambda: (*tokens(), tokens()[1]), token_loss),
    "SameTensorTwice": Kind(TiedLM, lambda: (tokens()[0],) * 2, token_loss),
    "UsedAtTimes": Kind(UsedAtTimes, positive, nn.CrossEntropyLoss()),
    "LossWithState": Kind(Mlp, vectors, LossWithState()),
    "BatchOfOne": Kind(Mlp, lambda: tuple(t[:1] for t in vectors()), nn.CrossEntropyLoss()),
    "SumLoss": Kind(Mlp, vectors, nn.CrossEntropyLoss(reduction="sum")),
}  # fmt: skip


def workload(name: str) -> Workload:
    """The workload called ``name``."""
    kind = {**KINDS, **REFUSED}[name]
    return Workload(
        model=kind.model,
        example=kind.example,
        loss=kind.loss,
        targets=kind.targets,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


class _Head(nn.Module):
    """A base for models that are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.calls = 0
        self.plain = torch.zeros(WIDTH)


class BranchOnValue(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # HP111
            h = h * 2
        return self.head(h)


class Condition(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.cond(x.sum() > 0, lambda t: self.a(t), lambda t: self.a(t) * 2, (x,))  # HP112
        return self.head(h)


class Counter(_Head):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # HP113
        return self.head(self.a(x) / self.calls)


class PlainState(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + self.plain
        self.plain = 0.9 * self.plain + h.detach().mean(0)  # HP113
        return self.head(h)


class BooleanIndex(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.head(h) + h[h > 0].mean()  # HP114


class ItemInForward(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.head(h) * x.max().item()  # HP114


class WritesParameter(_Head):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-1, 1)  # HP117
        return self.head(self.a(x))


class WritesParameterView(_Head):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight[0].zero_()  # HP117
        return self.head(self.a(x))


class EarlyAutocast(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.cast = torch.autocast("cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        with self.cast:
            return self.head(self.a(x)).float()


class CumulativeNorm(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.a(x)))  # HP111


class KeepsLast(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.last is not None:
            h = h + self.last
        self.last = h.detach()  # HP113
        return self.head(h)


class Resized(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grown", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + self.grown.sum()
        self.grown = torch.cat([self.grown, h.detach().mean().view(1)])  # HP113
        return self.head(h)


class Keyword(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ParameterDict({"for": nn.Parameter(torch.ones(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x) * self.named["for"])


class SharedMemory(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(self.a.weight.data[:2])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x)) + self.part.mean()


class WritesPlain(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + self.plain
        self.plain[0] = 2  # HP113
        return self.head(h)


class BufferOfParameter(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("follows", self.a.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x) + F.linear(x, self.follows))


class WritesSharedBuffer(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, WIDTH))
        self.register_buffer("row", self.table[0])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.row
        self.table.mul_(0.5)  # HP116
        return self.head(h + self.row)


class ListedParameter(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x) + F.linear(x, self.listed[0]))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return gradient


class PythonRandom(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.head(h * 2 if random.random() < 0.5 else h)


class Seeded(_Head):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(7)  # HP112
        return self.head(self.a(x) + torch.rand(WIDTH))


class SetsData(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.data = h.data * 2  # HP112
        return self.head(h)


class ClampsWeights(_Head):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.data.clamp_(-0.1, 0.1)  # HP117
        return self.head(self.a(x))


class SameNoiseTwice(_Head):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        h = self.a(x) * torch.rand(WIDTH)
        torch.set_rng_state(state)  # HP112
        return self.head(h + torch.rand(WIDTH))


class ForksNoise(_Head):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():  # HP112
            h = self.a(x) * torch.rand(WIDTH)
        return self.head(h + torch.rand(WIDTH))


class SeedsGenerator(_Head):
    def forward(self, x: Tensor) -> Tensor:
        torch.default_generator.manual_seed(5)
        return self.head(self.a(x) + torch.rand(WIDTH))


class TrainsItself(_Head):
    def forward(self, x: Tensor) -> Tensor:
        self.a(x).square().mean().backward()  # HP112
        return self.head(x)


class GradientPenalty(_Head):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.a(x).tanh().sum(), x, create_graph=True)  # HP112
        return self.head(self.a(x) + slope)


class Mapped(_Head):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.vmap(lambda row: self.a(row).tanh())(x))  # HP112


class HooksSaved(_Head):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):  # HP119
            h = torch.sigmoid(self.a(x))
        return self.head(h)


class SwitchesTraining(_Head):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.requires_grad_(False)
        return self.head(self.a(x))


class SwapsModules(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a  # HP113
        return self.head(self.b(torch.relu(self.a(x))))


class OwnGenerator(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x) + torch.rand(WIDTH, generator=self.generator))


class StraightThrough(_Head):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(Straight.apply(self.a(x)))  # HP119


class HooksGradient(_Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 3)  # HP119
        return self.head(h)


class ParameterHook(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x))


class ModuleHook(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_full_backward_hook(lambda _, inputs, __: inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x))


class DetachedLoss(_Head):
    def forward(self, x: Tensor) -> Tensor:  # noqa: ARG002
        return torch.zeros(BATCH, CLASSES) + 1


class WrongShape(_Head):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x)[:, :3])  # HP110


class NoScalar(_Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.a(x)) - y[:, None]  # HP107


class NoLoss(_Head):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.a(x)), y


def frozen() -> nn.Module:
    return Mlp().requires_grad_(False)


REFUSED: dict[str, Kind] = {
    **{
        m.__name__: _classifier(m)
        for m in (
            BranchOnValue, Condition, Counter, PlainState, BooleanIndex, ItemInForward, WritesParameter,
            WritesParameterView, CumulativeNorm, EarlyAutocast,
            WritesPlain, BufferOfParameter, WritesSharedBuffer, ListedParameter, StraightThrough, HooksGradient,
            ParameterHook, ModuleHook, PythonRandom, Seeded, OwnGenerator,
            SetsData, ClampsWeights, SameNoiseTwice, ForksNoise, SeedsGenerator, TrainsItself, GradientPenalty, Mapped,
            HooksSaved, SwitchesTraining, SwapsModules,
            KeepsLast, Resized, Keyword, SharedMemory, DetachedLoss, WrongShape,
        )
    },
    "NoScalar": Kind(NoScalar, vectors),
    "NoLoss": Kind(NoLoss, vectors),
    "Frozen": _classifier(frozen),
    "TooManyTargets": Kind(Mlp, vectors, nn.CrossEntropyLoss(), 3),
    "MissingKey": Kind(Mlp, keyword, nn.CrossEntropyLoss(), ["label"]),
}  # fmt: skip
