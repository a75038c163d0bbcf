"""What plain data parallelism would reach on the same cluster: the baseline of the paper, Horovod.

A prediction with the same times and the same links as the plan's, so that the two compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind
from hetpipe_compiler.ir.plan import DataParallel
from hetpipe_compiler.passes.stage_memory import MemoryRule


def predict_data_parallel(chain: BlockChain, cluster: Cluster) -> DataParallel:
    """Synchronous data parallelism with ring all-reduce.

    1. A device takes part if the whole model with one minibatch fits it (`replica_bytes`). **All** that fit take part,
       as in the paper, even if the step would be faster without the slowest kind.
    2. Each computes one minibatch; the step waits for the slowest. Its time is forward + backward, no stage border.
    3. Then gradients are summed round a ring of these devices in file order: 2 (n - 1) messages of 1/n of the
       parameter bytes each, all links at once, so each message takes as long as on the ring's slowest link. Nothing
       is overlapped with computation.
    4. The rate is n minibatches a step.
    """
    devices = [d for d in cluster.devices if replica_bytes(chain, d.kind) <= d.kind.memory_bytes]
    ids = tuple(device.id for device in devices)
    if not devices:
        return DataParallel(devices_that_fit=ids, devices=len(cluster.devices), samples_per_s=0.0)
    compute_ms = max(_minibatch_ms(chain, kind) for kind in {device.kind for device in devices})
    step_ms = compute_ms + ring_all_reduce_ms(cluster, devices, sum(p.bytes for p in chain.parameters))
    # A profiled graph may consist of zeros; plan.json cannot hold an infinite rate.
    rate = len(devices) * chain.batch_size / max(step_ms, 1e-9) * 1e3
    return DataParallel(devices_that_fit=ids, devices=len(cluster.devices), samples_per_s=rate)


def replica_bytes(chain: BlockChain, kind: DeviceKind) -> int:
    """Memory of the whole model in training with one minibatch in flight, with the reserve of ``kind``.

    Weights, gradients, optimizer state, frozen values, what autograd saves, and workspace. A chain with ``resident``
    says its memory itself: then that sum is all there is.
    """
    if chain.resident is not None:
        return sum(chain.resident)
    parameters = sum(p.bytes for p in chain.parameters)
    others = sum(f.bytes for f in chain.frozen) + sum(s.bytes for s in chain.saved)
    rule = MemoryRule.of(chain)
    step = rule.step_bytes(parameters, max((p.bytes for p in chain.parameters), default=0), on_cpu=kind.is_cpu)
    others += max(max(chain.workspace, default=0), step - sum(s.bytes for s in chain.saved))
    return 2 * parameters + math.ceil(parameters * chain.optimizer_factor) + others + kind.reserve_bytes


def ring_all_reduce_ms(cluster: Cluster, devices: Sequence[Device], n_bytes: int) -> float:
    """Milliseconds to sum ``n_bytes`` over ``devices`` in a ring of this order; 0.0 for one device."""
    n = len(devices)
    if n < 2:
        return 0.0
    links = {cluster.link_between(device, devices[(i + 1) % n]) for i, device in enumerate(devices)}
    return 2 * (n - 1) * max(link.ms(n_bytes / n) for link in links)


def _minibatch_ms(chain: BlockChain, kind: DeviceKind) -> float:
    return float(chain.forward_ms[kind.name].sum() + chain.backward_ms[kind.name].sum())
