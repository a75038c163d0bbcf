"""The plan: what hetpipe-compile decides, and all that hetpipe-inspect and hetpipe-run need to know.

It is written as ``plan.json``.

Stages and virtual workers count from 0. Milliseconds are for one minibatch; bytes are bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpipe_compiler.errors import ArtifactError

PLAN_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Port(_Model):
    """A value at a stage's border.

    Attributes:
        name: Its name in the stage modules (an fx node's name; for a shared parameter, a name made from it).
        kind: ``tensor``, ``parameter`` (the value of a shared parameter, sent by its owner) or ``scalar`` (int, float
            or bool, which rides in the message's header).
        source: Stage that makes it. The batch itself is made by stage 0.
        shape: For tensors; a string is a size that may differ from batch to batch.
        dtype: Torch's name without ``torch.``, or ``int``/``float``/``bool`` for a scalar.
        requires_grad: Whether a gradient comes back.
        bytes: For the example batch.
        batch_leaf: For what comes from the batch: which of its leaves (``torch.utils._pytree.tree_flatten`` order).
    """

    name: str
    kind: Literal["tensor", "parameter", "scalar"]
    source: int
    shape: tuple[int | str, ...]
    dtype: str
    requires_grad: bool
    bytes: int
    batch_leaf: int | None = None


class Tensor(_Model):
    """A parameter or buffer of the model, under the first name that the model gives it.

    Attributes:
        aliases: The model's other names for it (tied weights).
        mutated: For buffers: whether the forward pass changes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False
    persistent: bool = True
    mutated: bool = False
    aliases: tuple[str, ...] = ()
    bytes: int


class Stage(_Model):
    """One stage of one virtual worker.

    Attributes:
        nodes: fx nodes (or ids of a profiled graph) it runs, in order.
        blocks: Half-open interval of the block chain.
        module: Path of its Python file in the plan folder; None in a plan made from a profiled graph.
        measured: Whether all of its forward and backward times were measured; ``measured_share``: the share of them.
        stage_ms: What the partitioner balances: forward + backward + receiving activations and gradients.
        share: Of the model's forward and backward time on this kind (a repeated forward apart).
        memory_bytes: ``total`` and ``capacity`` of the device, and the parts that make up the total.
        receives_bytes: Activations and gradients received per minibatch.
        sends_bytes, sends_links: Later stage -> activations sent there per minibatch, and the link that they take.
        in_flight: w_s, minibatches between F and B on this stage.
        recompute: Whether it keeps its inputs only, and B runs the forward again first: ``backward_ms`` and
            ``stage_ms`` contain that.
        inputs: Ports it receives, in the order of the module's arguments (stage 0: the batch's tensors, with source 0).
        outputs: Ports it makes for later stages, in the order of what the module returns (last stage: the loss last).
        sends: Later stage -> names sent there straight away after a forward.
        parameters, buffers: Names (of `Plan.parameters` and `Plan.buffers`) that live here.
    """

    index: int
    device: str
    kind: str
    nodes: tuple[str, ...]
    blocks: tuple[int, int]
    module: str | None = None
    forward_ms: float
    backward_ms: float
    stage_ms: float
    measured: bool
    measured_share: float = 0.0
    share: float
    memory_bytes: dict[str, int]
    receives_bytes: int
    sends_bytes: dict[int, int] = Field(default_factory=dict)
    sends_links: dict[int, str] = Field(default_factory=dict)
    in_flight: int
    recompute: bool = False
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    sends: dict[int, tuple[str, ...]] = Field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


class VirtualWorker(_Model):
    """A pipeline of stages.

    Attributes:
        bottleneck_stage: Index of the stage with the largest ``stage_ms``, ``bottleneck_ms``.
        lower_bound_ms: Proven: no partition on these devices with ``nm`` in flight has a smaller bottleneck.
        optimal: Whether the bottleneck is as small as that; else it exceeds the optimum by less than the difference.
        searched: The cuts that the search chose from: how many blocks and closed sets.
        uncoarsened_bound_ms: Proven: no partition of the model's components has a smaller bottleneck either. The bound
            above is for the blocks that they were merged into; None where each is a block of its own.
    """

    index: int
    nm: int
    bottleneck_ms: float
    bottleneck_stage: int
    lower_bound_ms: float
    optimal: bool = False
    searched: str = ""
    uncoarsened_bound_ms: float | None = None
    samples_per_s: float
    stages: tuple[Stage, ...]


class Server(_Model):
    """The parameter server process of a node: which parameters it holds, and the host memory it needs."""

    node: str
    parameters: tuple[str, ...]
    memory_bytes: int


class DataParallel(_Model):
    """What plain data parallelism (synchronous, ring all-reduce) would reach on the same cluster.

    Attributes:
        devices_that_fit: Ids of the devices that can hold the whole model with one minibatch.
        devices: Devices in the cluster.
        samples_per_s: Predicted, using only those that fit; 0.0 if none does.
    """

    devices_that_fit: tuple[str, ...]
    devices: int
    samples_per_s: float


class WorkloadRef(_Model):
    """Where the model comes from: the copy of model.py in the plan folder, and its ``--set`` values."""

    path: str
    settings: dict[str, Any]
    digest: str


class Plan(_Model):
    """Everything decided at compile time.

    Attributes:
        partitioner: Who made the stages: ``search`` (ours), ``--split``, or the name of a partitioner of the user's.
        dynamic_batch: Whether other batch sizes than the example's run; ``dynamic_batch_note`` says why not.
        evaluation: Whether the stage modules also run in eval mode; ``evaluation_note`` says why not.
        update_scale: Factor that the servers apply to a pushed update (1/N by default).
        loss: Name of the loss among the last stage's outputs.
        weights: Whether the folder holds initial weights.
        digest: Of all else, as it was written: tells an edited file.
        cluster: The cluster file's content; ``cluster_digest`` its digest.
        predicted: ``roofline`` or ``profile``: where the times come from; ``runs``: of measured ones, the runs whose
            stage times were shared out among operators.
        counted_with: Whose kernels operations, activations and workspace were counted with, on every kind of device;
            None: a profiled graph says them.
    """

    format: Literal["hetpipe-plan"] = "hetpipe-plan"
    version: int = PLAN_VERSION
    name: str
    batch_size: int
    dynamic_batch: bool = True
    dynamic_batch_note: str | None = None
    evaluation: bool = False
    evaluation_note: str | None = None
    samples_per_s: float
    policy: str
    partitioner: str = "search"
    nm: int = Field(ge=1)
    staleness: int = Field(ge=0)
    placement: str
    update_scale: float
    predicted: str = "roofline"
    runs: tuple[str, ...] = ()
    counted_with: Literal["cpu"] | None = None
    loss: str | None = None
    weights: bool = False
    seed: int = 0
    workload: WorkloadRef | None = None
    cluster: dict[str, Any]
    cluster_digest: str
    unused_devices: tuple[str, ...]
    virtual_workers: tuple[VirtualWorker, ...]
    servers: tuple[Server, ...]
    data_parallel: DataParallel
    parameters: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    constants: tuple[Tensor, ...] = ()
    digest: str | None = None

    def worker(self, index: int) -> VirtualWorker:
        """Virtual worker ``index``; raises `ArtifactError` HP441 if the plan has none of that number."""
        if not 0 <= index < len(self.virtual_workers):
            count = len(self.virtual_workers)
            hint = f"--vw takes 0 to {count - 1}" if count > 1 else "leave out --vw: the only one is 0"
            raise ArtifactError("HP441", f"no virtual worker {index}: the plan has {count}", hint=hint)
        return self.virtual_workers[index]

    def to_json(self) -> str:
        """Stable text: the same plan gives the same bytes."""
        return self.model_copy(update={"digest": self.fingerprint()}).model_dump_json(indent=1) + "\n"

    def fingerprint(self) -> str:
        """Digest of everything in it."""
        return _digest(json.loads(self.model_dump_json()))

    def computes(self) -> str:
        """Digest of what each device computes: times measured with one plan are those of every plan with the same."""
        stages = [
            (worker.index, stage.device, stage.kind, stage.recompute, *stage.nodes)
            for worker in self.virtual_workers
            for stage in worker.stages
        ]
        model = self.workload.digest if self.workload is not None else ""
        return hashlib.sha256(json.dumps([model, self.batch_size, stages]).encode()).hexdigest()

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read ``folder/plan.json``; raises `ArtifactError` HP401-HP403, HP405 it was edited."""
        path = folder / "plan.json"
        if not path.is_file():
            raise ArtifactError(
                "HP401",
                "no plan.json here",
                where=str(folder),
                hint="make one: hetpipe-compile model.py --cluster c.yaml -o DIR",
            )
        try:
            text = path.read_text(encoding="utf-8")
            _check_version(text, path)
            plan = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"{part}." for part in first["loc"]).removesuffix(".")
            message = f"{place}: {first['msg']}" if place else first["msg"]
            raise ArtifactError("HP402", message, where=str(path), hint="compile again") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError("HP402", f"cannot be read: {error}", where=str(path), hint="compile again") from None
        if plan.digest is not None and plan.digest != _digest(json.loads(text)):
            raise ArtifactError(
                "HP405",
                "was edited: its times, memory and schedule belong to what it said before",
                where=str(path),
                hint="edit decisions.yaml beside it, and compile with --decisions; or compile again",
            )
        return plan.model_copy(update={"digest": None})


def _digest(content: dict[str, Any]) -> str:
    """Of a plan's JSON but for the digest in it."""
    text = json.dumps({name: value for name, value in content.items() if name != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_version(text: str, path: Path) -> None:
    """Another version's file may have any form, so its version is read before anything else is looked at."""
    try:
        version = json.loads(text)["version"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return  # no plan at all: told by its form
    if version != PLAN_VERSION:
        raise ArtifactError(
            "HP403",
            f"plan version {version}, this release reads {PLAN_VERSION}",
            where=str(path),
            hint="compile again",
        )
