"""Fit how much of its peaks a device reaches, per operator class, from a profile.

The model is the planner's own roofline (`hetpipe_compiler.ir.costs.Work.ms`): the larger of operations / (peak x
compute efficiency) and bytes / (bandwidth x memory efficiency), a share of the smaller, and a launch. For each class
the two efficiencies and the share minimise the mean of ``|log(predicted / measured)|`` over the passes (forward or
backward) that run kernels of that class alone; the share is 0 unless another is clearly nearer. A device that is faster
than the peaks it was described with gets higher peaks: an efficiency is at most 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.ir.cluster import Efficiency
from hetpipe_compiler.ir.costs import OPERATOR_CLASSES, NodeCost, Work
from hetpipe_compiler.ir.profile_file import Profile

#: Efficiencies are looked for on this grid.
_STEPS = np.geomspace(0.002, 1.0, 160)
#: Shares of the shorter of computing and moving bytes that may not overlap, and how much nearer one must be.
_SERIAL, _NEARER = (0.0, 0.25, 0.5, 0.75, 1.0), 0.02
#: Passes whose kernels move fewer bytes each are all launch.
_TINY_BYTES = 1 << 14
#: Passes that move so many bytes stream from memory.
_STREAM_BYTES = 4 << 20


@dataclass(frozen=True)
class Peaks:
    """What the device is said to reach at most."""

    fp32_tflops: float
    memory_bandwidth_gb_s: float


@dataclass(frozen=True)
class ClassFit:
    """What one class reaches.

    Attributes:
        error, nine_tenths: Relative error of the fit: the median, and what nine of ten measurements stay within.
        samples: Passes it stands on.
    """

    efficiency: Efficiency
    error: float
    nine_tenths: float
    samples: int

    def to_yaml(self) -> str:
        """For ``efficiencies:``."""
        compute, memory, serial = self.efficiency
        return f"{{compute: {compute:.3g}, memory: {memory:.3g}{f', serial: {serial:.3g}' if serial else ''}}}"


@dataclass(frozen=True)
class Calibration:
    """Peaks (raised where the device was faster), the launch overhead, and the classes that were measured."""

    peaks: Peaks
    launch_overhead_us: float
    classes: dict[str, ClassFit]

    def to_yaml(self, kind: str, memory_bytes: int, source: str) -> str:
        """A ``kinds:`` snippet for a cluster file."""
        lines = [
            "kinds:",
            f"  {kind}:",
            f"    memory_gb: {memory_bytes / 1e9:.4g}",
            f"    fp32_tflops: {self.peaks.fp32_tflops:.4g}",
            f"    memory_bandwidth_gb_s: {self.peaks.memory_bandwidth_gb_s:.4g}",
            f"    launch_overhead_us: {self.launch_overhead_us:.3g}",
            "    efficiencies:",
        ]
        lines += [
            f"      {name}: {fit.to_yaml()}"
            f"  # {fit.samples} measurements, median error {fit.error:.0%}, nine of ten within {fit.nine_tenths:.0%}"
            for name, fit in self.classes.items()
        ]
        return "\n".join([*lines, f'    source: "{source}"', ""])


@dataclass(frozen=True)
class _Sample:
    """One pass of an operator: its kernels that do something, and the milliseconds they took."""

    work: tuple[Work, ...]
    ms: float

    @property
    def operator_class(self) -> str | None:
        """The one class of its kernels; None if there are several. Element-wise helpers beside others do not count."""
        names = {w.operator_class for w in self.work if w.operator_class != "elementwise"} or {"elementwise"}
        return names.pop() if len(names) == 1 else None


def calibrate(costs: Iterable[NodeCost], profile: Profile, peaks: Peaks) -> Calibration:
    """Fit all classes that ``profile`` has measured; ``costs`` give the work behind its keys.

    Raises:
        ClusterError: HP236, the profile has no matrix product or no element-wise operator in FP32.
    """
    samples = _samples({cost.key: cost for cost in costs}, profile)
    for needed in ("matrix", "elementwise"):
        if not any(sample.operator_class == needed for sample in samples):
            raise ClusterError(
                "HP236",
                f"nothing of class {needed} was measured",
                where="--calibrate",
                hint="leave out model.py: a model for the purpose is measured",
            )
    launch_ms = _launch_ms(samples)
    raised = _raised(peaks, samples, launch_ms)
    classes = {}
    for name in OPERATOR_CLASSES:
        own = [s for s in samples if s.operator_class == name and s.ms > 2 * launch_ms * len(s.work)]
        if own:
            classes[name] = _fit(own, raised, launch_ms)
    return Calibration(raised, launch_ms * 1e3, classes)


def _samples(costs: Mapping[str, NodeCost], profile: Profile) -> list[_Sample]:
    samples = []
    for key, operator in profile.operators.items():
        cost = costs.get(key)
        if cost is None or operator.forward_ms is None or operator.backward_ms is None:
            continue
        for work, ms in ((cost.forward, operator.forward_ms), (cost.backward, operator.backward_ms)):
            if work and ms > 0 and all(w.dtype == "float32" for w in work):
                samples.append(_Sample(work, ms))
    return samples


def _launch_ms(samples: list[_Sample]) -> float:
    tiny = [s.ms / len(s.work) for s in samples if all(w.bytes <= _TINY_BYTES for w in s.work)]
    return float(np.median(tiny)) if tiny else min((s.ms / len(s.work) for s in samples), default=0.005)


def _raised(peaks: Peaks, samples: list[_Sample], launch_ms: float) -> Peaks:
    """Peaks no lower than what was reached; each sample's time bounds both rates from below."""
    net_s = [max(s.ms - launch_ms * len(s.work), 0.5 * s.ms) * 1e-3 for s in samples]
    tflops = max((sum(w.flops for w in s.work) / t / 1e12 for s, t in zip(samples, net_s, strict=True)), default=0.0)
    # Small operands come from caches, and an embedding reads little of its table: neither says anything about memory.
    streams = [
        (sum(w.bytes for w in s.work), t)
        for s, t in zip(samples, net_s, strict=True)
        if s.operator_class in ("elementwise", "normalisation")
    ]
    large = [(size, t) for size, t in streams if size >= _STREAM_BYTES] or streams
    gb_s = max((size / t / 1e9 for size, t in large), default=0.0)
    return Peaks(max(peaks.fp32_tflops, tflops), max(peaks.memory_bandwidth_gb_s, gb_s))


def _fit(samples: list[_Sample], peaks: Peaks, launch_ms: float) -> ClassFit:
    fits: list[tuple[float, Efficiency, FloatArray]] = []
    for serial in _SERIAL:
        logs = np.array([np.abs(np.log(_grid_ms(s, peaks, launch_ms, serial) / s.ms)) for s in samples])
        mean = logs.mean(axis=0)
        # Of equally good efficiencies the largest: what a class never reaches says nothing against it.
        compute, memory = np.argwhere(mean <= mean.min() * (1 + 1e-9))[-1]
        reached = Efficiency(float(_STEPS[compute]), float(_STEPS[memory]), serial)
        fits.append((float(mean[compute, memory]), reached, np.expm1(logs[:, compute, memory])))
    nearest = min(fits, key=lambda fit: fit[0])
    _, efficiency, errors = nearest if nearest[0] < fits[0][0] - _NEARER else fits[0]
    return ClassFit(efficiency, float(np.median(errors)), float(np.quantile(errors, 0.9)), len(samples))


def _grid_ms(sample: _Sample, peaks: Peaks, launch_ms: float, serial: float) -> FloatArray:
    """Predicted milliseconds for every (compute, memory) efficiency of the grid."""
    total: FloatArray = np.full((len(_STEPS), len(_STEPS)), launch_ms * len(sample.work))
    for work in sample.work:
        compute_ms = (work.flops / (peaks.fp32_tflops * 1e9) / _STEPS)[:, None]
        memory_ms = (work.bytes / (peaks.memory_bandwidth_gb_s * 1e6) / _STEPS)[None, :]
        total += np.maximum(compute_ms, memory_ms) + serial * np.minimum(compute_ms, memory_ms)
    return total
