"""Fits recover what synthetic measurements were made from."""

from __future__ import annotations

import numpy as np
import pytest

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.cluster import Cluster, DeviceKind, Efficiency
from hetpipe_compiler.ir.costs import NodeCost, Work
from hetpipe_compiler.ir.profile_file import Operator, Profile
from hetpipe_compiler.profiling.calibrate import Peaks, calibrate
from hetpipe_compiler.profiling.links import SIZES, fit_link, measure_local

TRUE = (
    ("matrix", Efficiency(0.8, 0.9)),
    ("convolution", Efficiency(0.5, 0.6, 1.0)),
    ("normalisation", Efficiency(0.2, 0.4)),
    ("elementwise", Efficiency(0.3, 0.8)),
)
KIND = DeviceKind("k", 1 << 34, 2.0, None, None, None, 100.0, 0.5, 0.5, 10.0, 0, "", TRUE)


def made():
    """Operators of each class on both sides of the ridge, with the times that `KIND` would take."""
    costs, operators = [], {}
    for name, _ in TRUE:
        for at, (flops, size) in enumerate(
            [(10**9, 10**6), (10**10, 10**6), (10**6, 10**8), (10**6, 10**7), (10**9, 10**8), (100, 400)]
        ):
            work = Work(flops, size, "float32", name)
            cost = NodeCost((work,), (work, work), size, (1,), "float32", True, key=f"{name}{at}")
            costs.append(cost)
            operators[cost.key] = Operator(forward_ms=cost.forward_ms(KIND), backward_ms=cost.backward_ms(KIND), runs=1)
    return costs, Profile(kind="k", device="d", backend="cpu", torch="2", threads=1, operators=operators)


def test_calibration_recovers_efficiencies():
    fit = calibrate(*made(), Peaks(KIND.fp32_tflops, KIND.memory_bandwidth_gb_s))
    assert fit.peaks == Peaks(2.0, 100.0)
    assert fit.launch_overhead_us == pytest.approx(10.0, rel=0.05)
    for name, reached in TRUE:
        assert tuple(fit.classes[name].efficiency) == pytest.approx(tuple(reached), rel=0.05)
        assert fit.classes[name].error < 0.05
        assert fit.classes[name].nine_tenths < 0.1


def test_a_device_faster_than_its_peaks_raises_them():
    fit = calibrate(*made(), Peaks(0.1, 1.0))
    assert fit.peaks.fp32_tflops == pytest.approx(2.0 * 0.8, rel=0.05)
    assert fit.peaks.memory_bandwidth_gb_s == pytest.approx(100.0 * 0.8, rel=0.05)
    assert all(max(f.efficiency) <= 1 for f in fit.classes.values())


def test_the_snippet_is_a_cluster_files(tmp_path):
    fit = calibrate(*made(), Peaks(KIND.fp32_tflops, KIND.memory_bandwidth_gb_s))
    nodes = "nodes: [{name: n0, devices: {mine: 1}, link: loopback}]\n"
    (tmp_path / "c.yaml").write_text(nodes + fit.to_yaml("mine", 8 * 10**9, "a test"))
    cluster = Cluster.load(tmp_path / "c.yaml")
    (kind,) = cluster.kinds()
    assert tuple(kind.efficiency("matrix")) == pytest.approx((0.8, 0.9, 0.0), rel=0.05)
    assert kind.efficiency("convolution").serial == 1.0
    # A class that was not measured has the uniform pair.
    assert kind.efficiency("embedding") == (kind.compute_efficiency, kind.memory_efficiency, 0.0)
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert (
        cluster.digest()
        != Cluster.from_dict({"nodes": [{"name": "n0", "devices": ["cpu"], "link": "loopback"}]}).digest()
    )


def test_nothing_to_fit():
    costs, profile = made()
    only = [cost for cost in costs if not cost.key.startswith("matrix")]
    with pytest.raises(ClusterError) as caught:
        calibrate(only, profile, Peaks(1.0, 1.0))
    assert caught.value.code == "HP236"


def test_an_unknown_class_is_refused():
    kinds = {"cpu": {"efficiencies": {"convolutions": {"compute": 0.5, "memory": 0.5}}}}
    with pytest.raises(ClusterError) as caught:
        Cluster.from_dict({"nodes": [{"name": "n0", "devices": ["cpu"], "link": "loopback"}], "kinds": kinds})
    assert "convolutions" in str(caught.value)


def test_link_fit_recovers_latency_and_bandwidth():
    rng = np.random.default_rng(0)
    exact = [0.05 + size / (2.0 * 1e6) for size in SIZES]
    fit = fit_link(SIZES, exact)
    assert fit.latency_us == pytest.approx(50.0)
    assert fit.bandwidth_gb_s == pytest.approx(2.0)
    assert fit.error < 1e-9
    noisy = fit_link(SIZES, [t * rng.uniform(0.95, 1.05) for t in exact])
    assert noisy.latency_us == pytest.approx(50.0, rel=0.1)
    assert noisy.bandwidth_gb_s == pytest.approx(2.0, rel=0.1)


def test_a_latency_is_never_negative():
    assert fit_link([1024, 1 << 20], [1e-6, 10.0]).latency_us == 0.0


@pytest.mark.slow
def test_a_link_of_this_machine():
    fit = measure_local((1 << 10, 1 << 16, 1 << 20))
    assert fit.bandwidth_gb_s > 0
    assert all(ms > 0 for ms in fit.quartile_ms)
