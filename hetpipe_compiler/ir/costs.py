"""What a node costs, counted on the operators that really run, before any device is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpipe_compiler.ir.cluster import DeviceKind


#: Operators that reach about the same share of a device's peaks.
OPERATOR_CLASSES = (
    "matrix",
    "convolution",
    "attention",
    "normalisation",
    "embedding",
    "transcendental",
    "elementwise",
)


@dataclass(frozen=True, slots=True)
class Work:
    """One operator as a device runs it.

    Attributes:
        flops: Floating-point operations (a multiply-add is two).
        bytes: Bytes read and written (`hetpipe_compiler.passes.operator_bytes`).
        dtype: Dtype of the computation: ``float32``, ``bfloat16``, ``float16``, ...
        operator_class: One of `OPERATOR_CLASSES`.
    """

    flops: int
    bytes: int
    dtype: str
    operator_class: str = "elementwise"

    def ms(self, kind: DeviceKind) -> float:
        """Roofline: the larger of computing and moving bytes, plus the launch (Williams et al., CACM 2009).

        Plus the share of the smaller that the class does not overlap: `hetpipe_compiler.ir.cluster.Efficiency`.
        """
        peak_tflops = kind.fp32_tflops
        if self.dtype == "bfloat16" and kind.bf16_tflops:
            peak_tflops = kind.bf16_tflops
        elif self.dtype == "float16" and kind.fp16_tflops:
            peak_tflops = kind.fp16_tflops
        elif self.dtype == "float32" and self.operator_class == "convolution" and kind.tf32_tflops:
            # What PyTorch does unless told otherwise: TF32 in cuDNN's convolutions, FP32 in matrix products.
            peak_tflops = kind.tf32_tflops
        reached = kind.efficiency(self.operator_class)
        compute_s = self.flops / (peak_tflops * 1e12 * reached.compute)
        memory_s = self.bytes / (kind.memory_bandwidth_gb_s * 1e9 * reached.memory)
        busy_s = max(compute_s, memory_s) + reached.serial * min(compute_s, memory_s)
        return busy_s * 1e3 + kind.launch_overhead_us * 1e-3


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """A storage that autograd keeps from forward to backward; ``producer`` is the node whose value it is."""

    producer: str
    bytes: int


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Autograd adds up the gradients of a value that several nodes read: ``count`` additions of its size.

    ``key`` is that of the addition, for profiles; ``profiled_ms``: device kind -> milliseconds of one, from a profile.
    """

    key: str
    work: Work
    count: int
    profiled_ms: Mapping[str, float] = field(default_factory=dict)

    def ms(self, kind: DeviceKind) -> float:
        """One addition: from a profile, or else a roofline estimate."""
        return self.profiled_ms[kind.name] if kind.name in self.profiled_ms else self.work.ms(kind)


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Cost of one fx node for the example batch.

    Attributes:
        forward, backward: The operators that run.
        output_bytes: Bytes of its value.
        shape, dtype: Of its value, if that is one tensor.
        requires_grad: Whether a gradient flows back into it.
        saved: Storages that the node is the first to keep for its backward (parameters excluded).
        key: What it has in common with all nodes that cost the same (`hetpipe_compiler.passes.node_key`).
        sums: Additions of the gradients of its value, and of parameters that it is the first to read; no part of
            ``backward``, but of its time.
        workspace: Bytes that live only while the node runs (`hetpipe_compiler.passes.annotate_cost`, rule 4).
        measured: Device kind -> milliseconds of (forward, backward) from a profile, without ``sums``.
        scaled: The same where a profile has no measurement but an estimate made like those that it has.
    """

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    output_bytes: int
    shape: tuple[int, ...] | None
    dtype: str | None
    requires_grad: bool
    saved: tuple[SavedStorage, ...] = field(default=())
    key: str = ""
    sums: tuple[GradientSum, ...] = ()
    workspace: int = 0
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scaled: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Forward and backward together."""
        return sum(w.flops for w in (*self.forward, *self.backward))

    def forward_ms(self, kind: DeviceKind) -> float:
        """From a profile, or else a roofline estimate of the forward pass."""
        profiled = self._profiled(kind)
        return profiled[0] if profiled else sum(w.ms(kind) for w in self.forward)

    def backward_ms(self, kind: DeviceKind) -> float:
        """From a profile, or else a roofline estimate of the backward pass; ``sums`` included."""
        profiled = self._profiled(kind)
        own_ms = profiled[1] if profiled else sum(w.ms(kind) for w in self.backward)
        return own_ms + sum(s.count * s.ms(kind) for s in self.sums)

    def _profiled(self, kind: DeviceKind) -> tuple[float, float] | None:
        return self.measured.get(kind.name) or self.scaled.get(kind.name)

    def is_measured(self, kind: DeviceKind) -> bool:
        """Whether its times on ``kind`` are measured; what costs nothing needs no measurement."""
        return kind.name in self.measured or not (self.forward or self.backward)
