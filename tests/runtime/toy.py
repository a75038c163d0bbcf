"""Plan folders written by hand for small networks, cut wherever a test wants: no compiler involved.

The network is a chain of five blocks with a skip from block 0 to block 3 (``h0``), as text, so that the whole model
and its stages are made from the same lines. Options: block 4 uses ``fc1.weight`` too (tied), BatchNorm in block 2,
dropout in block 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.plan import DataParallel, Plan, Port, Server, Stage, VirtualWorker
from hetpipe_compiler.ir.plan import Tensor as PlanTensor
from hetpipe_compiler.ir.schedule import Schedule
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.passes.schedules.wsp import wsp_program

WIDTH, FEATURES, CLASSES, BATCH = 16, 8, 5, 6


@dataclass(frozen=True)
class Network:
    """Which variant of the network."""

    tied: bool = False
    norm: bool = False
    dropout: bool = False
    frozen: bool = False
    dtype: str = "float32"

    def blocks(self) -> list[str]:
        """The body of each block: one or more assignments; ``P[name]`` is a parameter or buffer."""
        one = "F.dropout(torch.tanh({}), 0.25, True)" if self.dropout else "torch.tanh({})"
        two = (
            "F.batch_norm({}, P[bn.running_mean], P[bn.running_var], P[bn.weight], P[bn.bias], True, 0.1)"
            if self.norm
            else "torch.relu({})"
        )
        four = "F.linear(h3, P[fc1.weight])" if self.tied else "h3"
        lines = [
            "h0 = torch.relu(F.linear(x, P[fc0.weight], P[fc0.bias]))",
            "h1 = " + one.format("F.linear(h0, P[fc1.weight], P[fc1.bias])"),
            "h2 = " + two.format("F.linear(h1, P[fc2.weight], P[fc2.bias])"),
            "h3 = F.linear(h2, P[fc3.weight], P[fc3.bias]) + h0",
            f"loss = F.cross_entropy(F.linear({four}, P[fc4.weight], P[fc4.bias]), y)",
        ]
        if self.norm:
            lines[2] += "; P[bn.num_batches_tracked].add_(1)"
        return lines

    def initial(self) -> dict[str, torch.Tensor]:
        """Seeded initial parameters and buffers."""
        generator = torch.Generator().manual_seed(5)
        shapes = {"fc0": (WIDTH, FEATURES), "fc4": (CLASSES, WIDTH)} | {f"fc{i}": (WIDTH, WIDTH) for i in (1, 2, 3)}
        dtype = getattr(torch, self.dtype)
        values: dict[str, torch.Tensor] = {}
        for name in sorted(shapes):
            values[f"{name}.weight"] = 0.3 * torch.randn(shapes[name], generator=generator, dtype=dtype)
            values[f"{name}.bias"] = 0.1 * torch.randn(shapes[name][:1], generator=generator, dtype=dtype)
        if self.norm:
            values |= {"bn.weight": torch.ones(WIDTH, dtype=dtype), "bn.bias": torch.zeros(WIDTH, dtype=dtype)}
            values |= {"bn.running_mean": torch.zeros(WIDTH, dtype=dtype)}
            values |= {"bn.running_var": torch.ones(WIDTH, dtype=dtype), "bn.num_batches_tracked": torch.tensor(0)}
        return values

    def trainable(self, name: str) -> bool:
        """Whether it is a parameter that trains."""
        return not is_buffer(name) and not (self.frozen and name.startswith("fc0."))

    def source(self, blocks: Sequence[int], inputs: Sequence[str], outputs: Sequence[str], owned: Sequence[str]) -> str:
        """Python of a stage module."""
        initial = self.initial()
        text = ["import torch", "import torch.nn.functional as F", "", "class Stage(torch.nn.Module):"]
        text += ["    def __init__(self):", "        super().__init__()"]
        text += [f"        self.{part} = torch.nn.Module()" for part in dict.fromkeys(n.split(".")[0] for n in owned)]
        for name in owned:
            value = initial[name]
            empty = f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
            part, leaf = name.split(".")
            if is_buffer(name):
                text.append(f"        self.{part}.register_buffer({leaf!r}, {empty})")
            else:
                parameter = f"torch.nn.Parameter({empty}, requires_grad={self.trainable(name)})"
                text.append(f"        self.{part}.{leaf} = {parameter}")
        text.append(f"    def forward(self, {', '.join(inputs)}):")
        for block in blocks:
            line = re.sub(
                r"P\[([\w.]+)\]",
                lambda m: f"self.{m[1]}" if m[1] in owned else m[1].replace(".", "_"),
                self.blocks()[block],
            )
            text.append(f"        {line}")
        for name in outputs:
            if name.replace("_", ".", 1) in owned:
                text.append(f"        {name} = self.{name.replace('_', '.', 1)}")
        text.append(f"        return ({', '.join(outputs)},)")
        return "\n".join(text) + "\n"

    def whole(self) -> torch.nn.Module:
        """The uncut network with its initial values; called as ``model(x, y)``, returns the loss."""
        namespace: dict[str, Any] = {}
        initial = self.initial()
        exec(self.source(range(5), ["x", "y"], ["loss"], tuple(initial)), namespace)
        model: torch.nn.Module = namespace["Stage"]()
        model.load_state_dict(initial)
        return model


def is_buffer(name: str) -> bool:
    """Whether a name of the network is a buffer."""
    return name.startswith(("bn.running", "bn.num"))


def batch(generator: torch.Generator, dtype: str, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """A random batch."""
    x = torch.randn(size, FEATURES, generator=generator, dtype=getattr(torch, dtype))
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def make_batches(
    workers: int, minibatches: int, dtype: str = "float32"
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """``[vw][p - 1]``; the last of each virtual worker is short."""
    generator = torch.Generator().manual_seed(11)
    sizes = [BATCH] * (minibatches - 1) + [BATCH - 2]
    return [[batch(generator, dtype, size) for size in sizes] for _ in range(workers)]


@dataclass
class Toy:
    """A written plan folder with its network."""

    network: Network
    folder: Path
    plan: Plan
    in_flight: Sequence[Sequence[int]]

    def workload(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        batches: list[list[tuple[torch.Tensor, torch.Tensor]]] | None = None,
        scheduler: Any = None,
    ) -> LoadedWorkload:
        """A workload whose epoch of shard n is ``batches[n]``."""

        def data(shard: int, num_shards: int, seed: int) -> Any:  # noqa: ARG001
            assert batches is not None
            return batches[shard]

        example = batch(torch.Generator().manual_seed(1), self.network.dtype)
        return LoadedWorkload(
            Workload(
                model=self.network.whole,
                example=example,
                optimizer=optimizer,
                scheduler=scheduler,
                data=data if batches is not None else None,
            ),
            self.folder / "model.py",
            {},
        )

    def groups(self, vw: int) -> list[tuple[tuple[str, ...], int]]:
        """Trainable names and w of each stage of a virtual worker that has any."""
        stages = self.plan.virtual_workers[vw].stages
        named = [(tuple(n for n in s.parameters if self.network.trainable(n)), s.in_flight) for s in stages]
        return [(names, w) for names, w in named if names]


@dataclass
class _Cut:
    """The stages of one virtual worker: block ranges, and who makes and reads what."""

    network: Network
    ranges: list[tuple[int, int]]
    owned: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for lo, hi in self.ranges:
            used = re.findall(r"P\[([\w.]+)\]", "\n".join(self.network.blocks()[lo:hi]))
            self.owned.append([n for n in dict.fromkeys(used) if n not in seen])
            seen |= set(used)

    def source_of(self, value: str) -> int:
        """The stage that makes a value (the batch: 0)."""
        if value in ("x", "y"):
            return 0
        if re.fullmatch(r"h\d", value):
            return next(k for k, (lo, hi) in enumerate(self.ranges) if lo <= int(value[1]) < hi)
        return next(k for k, names in enumerate(self.owned) if value.replace("_", ".", 1) in names)

    def reads(self, k: int) -> list[str]:
        """Values that stage k gets from elsewhere."""
        lo, hi = self.ranges[k]
        read: dict[str, None] = {}
        made: set[str] = set()
        for line in self.network.blocks()[lo:hi]:
            right = line.split(" = ", 1)[1]
            for name in re.findall(r"P\[([\w.]+)\]|\b(x|y|h\d)\b", right):
                parameter, value = name
                if parameter and parameter not in self.owned[k]:
                    read[parameter.replace(".", "_")] = None
                elif value and value not in made:
                    read[value] = None
            made.add(line.split(" = ")[0])
        if k == 0:
            # What later stages need of the batch comes in here and is passed through.
            read = {"x": None} | ({"y": None} if len(self.ranges) > 1 or "y" in read else {}) | read
        order = ["x", "y", "h0", "h1", "h2", "h3"]
        return sorted(read, key=lambda n: order.index(n) if n in order else 99)

    def port(self, value: str) -> Port:
        """The port of a value."""
        dtype, initial = self.network.dtype, self.network.initial()
        if value == "x":
            return Port(
                name="x",
                kind="tensor",
                source=0,
                shape=("s0", FEATURES),
                dtype=dtype,
                requires_grad=False,
                bytes=192,
                batch_leaf=0,
            )
        if value == "y":
            return Port(
                name="y",
                kind="tensor",
                source=0,
                shape=("s0",),
                dtype="int64",
                requires_grad=False,
                bytes=48,
                batch_leaf=1,
            )
        source = self.source_of(value)
        if re.fullmatch(r"h\d", value):
            return Port(
                name=value,
                kind="tensor",
                source=source,
                shape=("s0", WIDTH),
                dtype=dtype,
                requires_grad=True,
                bytes=384,
            )
        shape = tuple(initial[value.replace("_", ".", 1)].shape)
        return Port(
            name=value, kind="parameter", source=source, shape=shape, dtype=dtype, requires_grad=True, bytes=1024
        )


def write_toy(
    folder: Path,
    network: Network,
    *,
    cuts: Sequence[Sequence[int]],
    in_flight: Sequence[Sequence[int]],
    nm: int,
    staleness: int,
    speeds: Sequence[float] | None = None,
) -> Toy:
    """Write a plan folder: ``cuts[vw]`` are the first blocks of stages 1, 2, ...; ``speeds[vw]`` scales its times."""
    (folder / "stages").mkdir(parents=True)
    initial = network.initial()
    workers = []
    for vw, starts in enumerate(cuts):
        speed = speeds[vw] if speeds else 1.0
        cut = _Cut(network, list(zip([0, *starts], [*starts, 5], strict=True)))
        workers.append(_worker(folder, network, cut, vw, in_flight[vw], nm, speed))
    names = [n for n in initial if not is_buffer(n)]
    plan = Plan(
        name="toy",
        batch_size=BATCH,
        samples_per_s=1.0,
        policy="hand",
        nm=nm,
        staleness=staleness,
        placement="round-robin",
        update_scale=1 / len(cuts),
        loss="loss",
        weights=True,
        cluster=_cluster(max(len(c) for c in cuts) + 1, len(cuts)),
        cluster_digest="0" * 64,
        unused_devices=(),
        virtual_workers=tuple(workers),
        servers=tuple(
            Server(node=f"n{i}", parameters=tuple(names[i :: len(cuts)]), memory_bytes=0) for i in range(len(cuts))
        ),
        data_parallel=DataParallel(devices_that_fit=(), devices=0, samples_per_s=0.0),
        parameters=tuple(_tensor(n, initial[n], trainable=network.trainable(n)) for n in names),
        buffers=tuple(_tensor(n, v, mutated=True) for n, v in initial.items() if is_buffer(n)),
    )
    (folder / "plan.json").write_text(plan.to_json())
    programs = tuple(wsp_program(w, nm, staleness) for w in in_flight)
    (folder / "schedule.csv").write_text(Schedule(nm, staleness, programs).to_csv())
    save_file(initial, folder / "weights.safetensors")
    return Toy(network, folder, plan, in_flight)


def _worker(
    folder: Path, network: Network, cut: _Cut, vw: int, in_flight: Sequence[int], nm: int, speed: float
) -> VirtualWorker:
    stages = []
    last = len(cut.ranges) - 1
    reads = [cut.reads(k) for k in range(last + 1)]
    for k, (lo, hi) in enumerate(cut.ranges):
        sends = {
            j: tuple(n for n in reads[j] if cut.source_of(n) == k)
            for j in range(k + 1, last + 1)
            if any(cut.source_of(n) == k for n in reads[j])
        }
        outputs = list(dict.fromkeys(n for names in sends.values() for n in names)) + (["loss"] if k == last else [])
        module = f"stages/vw{vw}_stage{k}.py"
        (folder / module).write_text(network.source(range(lo, hi), reads[k], outputs, cut.owned[k]))
        loss = Port(name="loss", kind="tensor", source=k, shape=(), dtype=network.dtype, requires_grad=True, bytes=4)
        stages.append(
            Stage(
                index=k,
                device=f"n{vw}:{k}",
                kind="cpu",
                nodes=(),
                blocks=(lo, hi),
                module=module,
                forward_ms=speed * (hi - lo),
                backward_ms=2 * speed * (hi - lo),
                stage_ms=3 * speed * (hi - lo),
                measured=False,
                share=0.5,
                memory_bytes={"total": 0, "capacity": 1},
                receives_bytes=0,
                in_flight=in_flight[k],
                inputs=tuple(cut.port(n) for n in reads[k]),
                outputs=tuple(loss if n == "loss" else cut.port(n) for n in outputs),
                sends=sends,
                parameters=tuple(n for n in cut.owned[k] if not is_buffer(n)),
                buffers=tuple(n for n in cut.owned[k] if is_buffer(n)),
            )
        )
    return VirtualWorker(
        index=vw,
        nm=nm,
        bottleneck_ms=1.0,
        bottleneck_stage=0,
        lower_bound_ms=1.0,
        samples_per_s=1.0,
        stages=tuple(stages),
    )


def _tensor(name: str, value: torch.Tensor, *, trainable: bool = False, mutated: bool = False) -> PlanTensor:
    return PlanTensor(
        name=name,
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        trainable=trainable,
        mutated=mutated,
        bytes=value.numel() * value.element_size(),
    )


def _cluster(devices: int, nodes: int) -> dict[str, Any]:
    link = {"bandwidth_gb_s": 1e-3, "latency_us": 100}
    return {
        "name": "toy",
        "nodes": [{"name": f"n{i}", "devices": {"cpu": devices}, "link": link} for i in range(nodes)],
        "network": {"bandwidth_gb_s": 5e-4, "latency_us": 300},
    }
