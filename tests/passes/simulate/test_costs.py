"""Pipeline times from a plan: who exchanges what with whom, over which link."""

from __future__ import annotations

import numpy as np
from handmade_plans import equal_distribution

from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Port, VirtualWorker
from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.passes.simulate.timeline import same_parameters

CLUSTER = Cluster.from_dict(
    {
        "name": "two nodes",
        "nodes": [
            {"name": "n0", "devices": {"titan-v": 2}, "link": {"bandwidth_gb_s": 10.0, "latency_us": 0}},
            {"name": "n1", "devices": {"titan-v": 1}, "link": {"bandwidth_gb_s": 10.0, "latency_us": 0}},
        ],
        "network": {"bandwidth_gb_s": 1.0, "latency_us": 0},
    }
)


def port(name: str, source: int, n_bytes: int, *, grad: bool = True) -> Port:
    return Port(name=name, kind="tensor", source=source, shape=(1,), dtype="float32", requires_grad=grad, bytes=n_bytes)


def three_stages() -> VirtualWorker:
    """Stage 0 sends x to 1 and labels to 2 (no gradient); stage 1 sends y and a mask to 2."""
    worker = equal_distribution().virtual_workers[0]
    first, second, third = worker.stages[:3]
    stages = (
        first.model_copy(update={"device": "n0:0", "sends_bytes": {1: 10_000_000, 2: 1_000_000}}),
        second.model_copy(
            update={
                "device": "n0:1",
                "inputs": (port("x", 0, 10_000_000),),
                "sends_bytes": {2: 3_000_000},
                "parameters": ("a", "b"),
            }
        ),
        third.model_copy(
            update={
                "device": "n1:0",
                "inputs": (
                    port("labels", 0, 1_000_000, grad=False),
                    port("y", 1, 2_000_000),
                    port("mask", 1, 1_000_000, grad=False),
                ),
                "sends_bytes": {},
                "parameters": ("c",),
            }
        ),
    )
    return worker.model_copy(update={"stages": stages})


def test_messages_take_the_link_between_their_devices() -> None:
    worker = three_stages()
    costs = PipelineCosts.of_plan(worker, CLUSTER)
    none = np.nan
    # 10 MB at 10 GB/s in the node; between the nodes 1 GB/s.
    np.testing.assert_allclose(costs.activation_ms, [[none, 1.0, 1.0], [none, none, 3.0], [none] * 3])
    np.testing.assert_allclose(costs.gradient_ms, [[none] * 3, [1.0, none, none], [none, 2.0, none]])
    assert costs.forward_ms.tolist() == [stage.forward_ms for stage in worker.stages]
    assert costs.backward_ms.tolist() == [stage.backward_ms for stage in worker.stages]


def test_a_plan_without_named_values_sends_gradients_back_the_same_way() -> None:
    worker = three_stages()
    bare = worker.model_copy(update={"stages": tuple(s.model_copy(update={"inputs": ()}) for s in worker.stages)})
    costs = PipelineCosts.of_plan(bare, CLUSTER)
    np.testing.assert_array_equal(costs.gradient_ms, costs.activation_ms.T)
    assert costs.activation_ms[1, 2] == 3.0


def test_stages_that_share_parameters() -> None:
    first = three_stages()
    other_cut = first.model_copy(
        update={
            "index": 1,
            "stages": tuple(
                stage.model_copy(update={"parameters": names})
                for stage, names in zip(first.stages, [("a",), ("b", "c"), ()], strict=True)
            ),
        }
    )
    shares = same_parameters([first, other_cut])
    assert shares[0, 0] == frozenset()
    assert shares[0, 1] == {(0, 1), (1, 0), (1, 1)}
    assert shares[0, 2] == {(0, 2), (1, 1)}
    assert shares[1, 0] == {(1, 0), (0, 1)}
