"""What a node costs, counted on the operators that really run, before any device is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpipe_compiler.ir.cluster import DeviceKind


@dataclass(frozen=True, slots=True)
class Work:
    """One operator as a device runs it.

    Attributes:
        flops: Floating-point operations (a multiply-add is two).
        bytes: Bytes read and written, each tensor once.
        dtype: Dtype of the computation: ``float32``, ``bfloat16``, ``float16``, ...
    """

    flops: int
    bytes: int
    dtype: str

    def ms(self, kind: DeviceKind) -> float:
        """Roofline: the larger of computing and moving bytes, plus the launch (Williams et al., CACM 2009)."""
        peak_tflops = kind.fp32_tflops
        if self.dtype == "bfloat16" and kind.bf16_tflops:
            peak_tflops = kind.bf16_tflops
        elif self.dtype == "float16" and kind.fp16_tflops:
            peak_tflops = kind.fp16_tflops
        compute_s = self.flops / (peak_tflops * 1e12 * kind.compute_efficiency)
        memory_s = self.bytes / (kind.memory_bandwidth_gb_s * 1e9 * kind.memory_efficiency)
        return max(compute_s, memory_s) * 1e3 + kind.launch_overhead_us * 1e-3


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """A storage that autograd keeps from forward to backward; ``producer`` is the node whose value it is."""

    producer: str
    bytes: int


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Cost of one fx node for the example batch.

    Attributes:
        forward, backward: The operators that run.
        output_bytes: Bytes of its value.
        shape, dtype: Of its value, if that is one tensor.
        requires_grad: Whether a gradient flows back into it.
        saved: Storages that the node is the first to keep for its backward (parameters excluded).
    """

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    output_bytes: int
    shape: tuple[int, ...] | None
    dtype: str | None
    requires_grad: bool
    saved: tuple[SavedStorage, ...] = field(default=())

    @property
    def flops(self) -> int:
        """Forward and backward together."""
        return sum(w.flops for w in (*self.forward, *self.backward))

    def forward_ms(self, kind: DeviceKind) -> float:
        """Roofline estimate of the forward pass."""
        return sum(w.ms(kind) for w in self.forward)

    def backward_ms(self, kind: DeviceKind) -> float:
        """Roofline estimate of the backward pass."""
        return sum(w.ms(kind) for w in self.backward)
