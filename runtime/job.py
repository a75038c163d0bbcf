"""What one run does: RUN/run.json, written by the launcher and read by every process of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.files import write_text
from hetpipe_compiler.ir.plan import Plan

FILE_NAME = "run.json"


class Job(BaseModel):
    """The options of a run, with defaults filled in.

    Attributes:
        evaluates: The virtual worker that evaluates; None: all train.
        plan: The plan folder; ``computes``, ``fingerprint``: the `Plan` methods' answers for the plan in it.
        minibatches: Per virtual worker, the same for all.
        shard_lengths: Batches in each virtual worker's shard; None without ``data`` in the workload.
        threads: Compute threads of each process.
        workload: The model.py to use.
        settings: What its ``workload()`` is called with.
        weights: safetensors file with the initial weights and buffers; of an evaluation, with those to evaluate.
        unsaved_buffers: Of an evaluation: the file with the buffers that models do not save, if there are any.
        save_every: Waves between saved weights; None: only at the end.
        timeout_s: Seconds without progress of any process after which the run ends with a report.
        store: HOST:PORT of the launcher's TCPStore.
        events: ZeroMQ endpoint of the launcher's event channel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    evaluates: int | None = None
    plan: Path
    computes: str = ""
    fingerprint: str = ""
    minibatches: int
    shard_lengths: tuple[int, ...] | None
    seed: int
    reproducible: bool
    threads: int
    backend: Literal["cpu", "cuda"]
    workload: Path
    settings: dict[str, Any]
    weights: Path
    unsaved_buffers: Path | None = None
    save_every: int | None
    timeout_s: float
    store: str = ""
    events: str = ""

    def save(self, run: Path) -> None:
        """Write it into the run folder. Raises `ArtifactError` HP411."""
        write_text(run / FILE_NAME, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, run: Path) -> Job:
        """Read it from the run folder."""
        return cls.model_validate_json((run / FILE_NAME).read_text(encoding="utf-8"))

    def load_plan(self) -> Plan:
        """The plan of the run, for its processes.

        Raises:
            ArtifactError: HP401-HP405 see `Plan.load`; HP406 the folder has another plan than when the run began.
        """
        plan = Plan.load(self.plan)
        if plan.fingerprint() != self.fingerprint:
            raise ArtifactError(
                "HP406",
                "holds another plan now than when the run began",
                where=str(self.plan),
                hint="start the run again; compile into another folder while a run is starting",
            )
        return plan


def worker_name(vw: int, stage: int) -> str:
    """``vw0/stage1``: how a worker is called in messages and events."""
    return f"vw{vw}/stage{stage}"


def server_name(node: str) -> str:
    """``server n0``."""
    return f"server {node}"


def log_path(run: Path, process: str) -> Path:
    """RUN/logs/vw0-stage1.log, RUN/logs/server-n0.log."""
    return run / "logs" / (process.replace("/", "-").replace(" ", "-") + ".log")
