"""The data-parallel baseline, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetpipe_compiler.ir.blocks import Block, BlockChain, SharedBytes
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.passes.data_parallel import predict_data_parallel, replica_bytes, ring_all_reduce_ms

MIB = 2**20


def cluster_of(*counts: tuple[int, int], latency_us: float = 0.0) -> Cluster:
    """Nodes of (big, small) devices; 10 GB/s inside a node, 1 GB/s between."""
    kinds = {
        "big": {"memory_mib": 1000, "reserve_mib": 100, "fp32_tflops": 10, "memory_bandwidth_gb_s": 100},
        "small": {"memory_mib": 500, "reserve_mib": 100, "fp32_tflops": 5, "memory_bandwidth_gb_s": 100},
    }
    nodes = [
        {
            "name": f"n{i}",
            "devices": [{kind: n} for kind, n in zip(("big", "small"), count, strict=True) if n],
            "link": {"bandwidth_gb_s": 10, "latency_us": latency_us},
        }
        for i, count in enumerate(counts)
    ]
    network = {"bandwidth_gb_s": 1, "latency_us": latency_us}
    return Cluster.from_dict({"nodes": nodes, "network": network, "kinds": kinds})


def chain_of(parameters_mib: int = 50, saved_mib: int = 100, frozen_mib: int = 20) -> BlockChain:
    """Two blocks: 30 ms a minibatch on ``big``, 60 ms on ``small``; SGD with momentum."""
    return BlockChain(
        name="toy",
        batch_size=8,
        blocks=(Block("a", ("n0",)), Block("b", ("n1",))),
        forward_ms={"big": np.array([4.0, 6.0]), "small": np.array([8.0, 12.0])},
        backward_ms={"big": np.array([8.0, 12.0]), "small": np.array([16.0, 24.0])},
        measured=True,
        values=(),
        parameters=(SharedBytes("p", parameters_mib * MIB, (0, 1)),),
        frozen=(SharedBytes("f", frozen_mib * MIB, (1,)),),
        saved=(SharedBytes("s", saved_mib * MIB, (0, 1)),),
        optimizer_factor=1.0,
    )


def test_memory_counts_each_part_once() -> None:
    small = cluster_of((0, 1)).kinds()[0]
    # Weights, gradients and momentum; frozen; saved (shared by both blocks, once); reserve.
    assert replica_bytes(chain_of(), small) == (3 * 50 + 20 + 100 + 100) * MIB
    assert replica_bytes(replace(chain_of(), resident=(3, 4)), small) == 7


def test_one_device_needs_no_all_reduce() -> None:
    result = predict_data_parallel(chain_of(), cluster_of((1, 0)))
    assert result.devices_that_fit == ("n0:0",)
    assert result.samples_per_s == pytest.approx(8 / 0.030)


def test_the_slowest_device_and_the_slowest_link_decide() -> None:
    result = predict_data_parallel(chain_of(), cluster_of((2, 0), (0, 2)))
    all_reduce_ms = 2 * 3 / 4 * 50 * MIB / 1e9 * 1e3
    assert result.devices == 4
    assert result.devices_that_fit == ("n0:0", "n0:1", "n1:0", "n1:1")
    assert result.samples_per_s == pytest.approx(4 * 8 / (60 + all_reduce_ms) * 1e3)


def test_a_ring_inside_one_node_uses_its_link() -> None:
    cluster = cluster_of((3, 0))
    assert ring_all_reduce_ms(cluster, cluster.devices, 9_000_000) == pytest.approx(2 * 2 * 3_000_000 / 10e9 * 1e3)


def test_latency_counts_once_a_message() -> None:
    cluster = cluster_of((4, 0), latency_us=500.0)
    assert ring_all_reduce_ms(cluster, cluster.devices, 4) == pytest.approx(2 * 3 * 0.5, rel=1e-6)


def test_only_devices_that_fit_take_part() -> None:
    # 3 x 50 + 20 + 250 + 100 = 520 MiB: too much for the small ones, and the ring stays inside n0.
    result = predict_data_parallel(chain_of(saved_mib=250), cluster_of((2, 2), (0, 2)))
    assert result.devices_that_fit == ("n0:0", "n0:1")
    assert result.devices == 6
    assert result.samples_per_s == pytest.approx(2 * 8 / (30 + 50 * MIB / 10e9 * 1e3) * 1e3)


def test_memory_that_fits_exactly_fits() -> None:
    assert len(predict_data_parallel(chain_of(saved_mib=230), cluster_of((0, 1))).devices_that_fit) == 1
    assert len(predict_data_parallel(chain_of(saved_mib=231), cluster_of((0, 1))).devices_that_fit) == 0


def test_none_fits() -> None:
    result = predict_data_parallel(chain_of(parameters_mib=400), cluster_of((1, 1)))
    assert (result.devices_that_fit, result.devices, result.samples_per_s) == ((), 2, 0.0)
