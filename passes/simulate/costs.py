"""The times of one virtual worker's pipeline, as the simulators and the placing of messages take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import VirtualWorker

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PipelineCosts:
    """Times of one minibatch in one virtual worker of k stages, milliseconds.

    Attributes:
        forward_ms, backward_ms: Per stage, shape (k,).
        activation_ms: ``[i, j]``, i < j: time of the message that stage i sends to stage j after its forward; NaN where
            none is sent. Shape (k, k).
        gradient_ms: ``[i, j]``, i > j: the same for the gradients that stage i sends to stage j after its backward.
    """

    forward_ms: FloatArray
    backward_ms: FloatArray
    activation_ms: FloatArray
    gradient_ms: FloatArray

    def __post_init__(self) -> None:
        k = len(self.forward_ms)
        assert self.backward_ms.shape == (k,)
        assert self.activation_ms.shape == self.gradient_ms.shape == (k, k)

    def __len__(self) -> int:
        return len(self.forward_ms)

    @property
    def key(self) -> tuple[bytes, ...]:
        """Equal for equal times."""
        return tuple(a.tobytes() for a in (self.forward_ms, self.backward_ms, self.activation_ms, self.gradient_ms))

    @classmethod
    def chain(
        cls, forward_ms: Sequence[float], backward_ms: Sequence[float], message_ms: float | Sequence[float] = 0.0
    ) -> PipelineCosts:
        """A pipeline whose neighbours alone exchange messages, ``message_ms`` (one for all, or one a cut) each way."""
        k = len(forward_ms)
        activation, gradient = np.full((k, k), np.nan), np.full((k, k), np.nan)
        cuts = np.broadcast_to(np.asarray(message_ms, dtype=np.float64), (max(k - 1, 0),))
        for i, ms in enumerate(cuts):
            activation[i, i + 1] = gradient[i + 1, i] = ms
        forward, backward = np.asarray(forward_ms, dtype=np.float64), np.asarray(backward_ms, dtype=np.float64)
        return cls(forward, backward, activation, gradient)

    @classmethod
    def of_plan(cls, worker: VirtualWorker, cluster: Cluster) -> PipelineCosts:
        """The times that the plan predicts for ``worker``: the same numbers in every process that reads the plan.

        A stage receives activations from each stage that made one of its inputs, and sends gradients to those of them
        that want one. In a plan from a profiled graph, which names no values, gradients go where activations came from.
        """
        stages = worker.stages
        k = len(stages)
        activation, gradient = np.full((k, k), np.nan), np.full((k, k), np.nan)
        for j, stage in enumerate(stages):
            for i in range(j):
                link = cluster.link_between(cluster.device(stages[i].device), cluster.device(stage.device))
                ports = [port for port in stage.inputs if port.source == i]
                forward_bytes = stages[i].sends_bytes.get(j, sum(port.bytes for port in ports))
                wanted = [port.bytes for port in ports if port.requires_grad]
                if ports or forward_bytes:
                    activation[i, j] = link.ms(forward_bytes)
                if wanted:
                    gradient[j, i] = link.ms(sum(wanted))
                elif forward_bytes and not stage.inputs:
                    gradient[j, i] = link.ms(forward_bytes)
        forward = np.array([stage.forward_ms for stage in stages], dtype=np.float64)
        backward = np.array([stage.backward_ms for stage in stages], dtype=np.float64)
        return cls(forward, backward, activation, gradient)
