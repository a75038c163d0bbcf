"""Plans written by hand, for tests of everything that reads plans: no compiler needed."""

from __future__ import annotations

from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import DataParallel, Plan, Server, Stage, Tensor, VirtualWorker

MEMORY = {"titan-v": 12e9, "titan-rtx": 24e9, "rtx-2060": 6e9, "quadro-p4000": 8e9}
MODULES = ("features.0", "features.3", "features.7", "features.10", "classifier.0", "classifier.3", "classifier.6")


def stage(
    index: int, device: str, kind: str, scale: float, *, link: str | None, last: bool, skip: int | None = None
) -> Stage:
    """A stage whose numbers grow with ``scale``; ``skip``: a later stage that gets a value straight from here."""
    parts = {
        "parameters": int(120e6 * scale),
        "versions": int(240e6 * scale) if index == 0 else 0,
        "gradients": int(120e6 * scale),
        "optimizer": int(120e6 * scale),
        "activations": int(1.9e9 / scale),
        "reserve": 600_000_000,
    }
    sends = {} if last else {index + 1: int(51.4e6 / (index + 1))}
    if skip is not None:
        sends[skip] = 204_800
    return Stage(
        index=index,
        device=device,
        kind=kind,
        nodes=tuple(f"n{index}_{i}" for i in range(3)),
        blocks=(index * 3, index * 3 + 3),
        module=f"stages/a_stage{index}.py",
        forward_ms=11.0 * scale,
        backward_ms=23.5 * scale,
        stage_ms=40.25 * scale,
        measured=False,
        share=0.25,
        memory_bytes={**parts, "total": sum(parts.values()), "capacity": int(MEMORY[kind])},
        receives_bytes=0 if index == 0 else int(102e6 / index),
        sends_bytes=sends,
        in_flight=4 - index,
        sends_links={} if link is None else {index + 1: link},
    )


def worker(index: int, devices: list[tuple[str, str, float]], links: list[str | None]) -> VirtualWorker:
    """A virtual worker of (device, kind, scale) stages."""
    stages = tuple(
        stage(
            i,
            d,
            k,
            scale,
            link=(*links[1:], None)[i],
            last=i == len(devices) - 1,
            skip=3 if i == 0 and len(devices) > 3 else None,
        )
        for i, (d, k, scale) in enumerate(devices)
    )
    worst = max(stages, key=lambda s: s.stage_ms)
    return VirtualWorker(
        index=index,
        nm=4,
        bottleneck_ms=worst.stage_ms,
        bottleneck_stage=worst.index,
        lower_bound_ms=worst.stage_ms * 0.93,
        samples_per_s=0.96 * 32_000 / worst.stage_ms,
        stages=stages,
    )


def make_plan(workers: tuple[VirtualWorker, ...], *, policy: str, fit: int = 12) -> Plan:
    """A plan of these workers with two parameter servers."""
    parameters = tuple(
        Tensor(name=f"{m}.weight", shape=(1000, 1000), dtype="float32", trainable=True, bytes=4_000_000)
        for m in MODULES
    )
    names = tuple(p.name for p in parameters)
    return Plan(
        name="vgg19",
        batch_size=32,
        samples_per_s=len(workers) * min(w.samples_per_s for w in workers),
        policy=policy,
        nm=4,
        staleness=0,
        placement="local",
        update_scale=1 / len(workers),
        counted_with="cpu",
        cluster={"name": "paper"},
        cluster_digest="0" * 64,
        unused_devices=(),
        virtual_workers=workers,
        servers=(
            Server(node="n0", parameters=names[:4], memory_bytes=96_000_000),
            Server(node="n1", parameters=names[4:], memory_bytes=72_000_000),
        ),
        data_parallel=DataParallel(
            devices_that_fit=tuple(f"n{i // 4}:{i % 4}" for i in range(fit)),
            devices=16,
            samples_per_s=339.0 if fit else 0.0,
        ),
        parameters=parameters,
    )


def equal_distribution() -> Plan:
    """ED: four alike virtual workers of four unlike devices."""
    kinds = [("titan-v", 1.0), ("titan-rtx", 1.1), ("rtx-2060", 0.8), ("quadro-p4000", 1.25)]
    links = [None, *["infiniband-fdr"] * 3]
    return make_plan(
        tuple(
            worker(vw, [(f"n{i}:{vw}", kind, scale) for i, (kind, scale) in enumerate(kinds)], links) for vw in range(4)
        ),
        policy="ED",
    )


def node_partition() -> Plan:
    """NP: two unlike virtual workers of two and four devices; the model fits no single device."""
    pcie = "pcie3-x16"
    return make_plan(
        (
            worker(0, [(f"n0:{i}", "titan-v", 1.0 + 0.01 * i) for i in range(2)], [None, pcie]),
            worker(1, [(f"n2:{i}", "rtx-2060", 2.0) for i in range(4)], [None, pcie, pcie, pcie]),
        ),
        policy="NP",
        fit=0,
    )


def with_cluster(plan: Plan) -> Plan:
    """The plan with the paper's cluster in it, which the timeline needs."""
    kinds = ("titan-v", "titan-rtx", "rtx-2060", "quadro-p4000")
    nodes = [{"name": f"n{i}", "devices": {kind: 4}, "link": "pcie3-x16"} for i, kind in enumerate(kinds)]
    cluster = Cluster.from_dict({"name": "paper", "nodes": nodes, "network": "infiniband-fdr"})
    return plan.model_copy(update={"cluster": cluster.to_dict(), "cluster_digest": cluster.digest()})
