"""Every mistake in a cluster or groups file is one error with code, place and next step: the whole text is golden.

After a wanted change: ``UPDATE_GOLDEN=1 pytest tests/ir/test_cluster_errors.py`` and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.config_file import parse_yaml
from hetpipe_compiler.passes.allocate import allocate
from hetpipe_compiler.passes.place_parameters import place_parameters

GOLDEN = Path(__file__).parent.parent / "golden" / "cluster_errors.txt"

GOOD = """\
name: good
nodes:
  - {name: n0, devices: {titan-v: 4}, link: pcie3-x16}
  - {name: n1, devices: {rtx-2060: 4}, link: {bandwidth_gb_s: 12.0, latency_us: 6}}
network: infiniband-fdr
kinds:
  my-card: {memory_gb: 8, fp32_tflops: 5.3, memory_bandwidth_gb_s: 243}
emulate: {time_scale: 1.0}
"""

# Title -> (part of GOOD, what stands there instead). An empty first part: the whole file is replaced.
CLUSTER_CASES: dict[str, tuple[str, str]] = {
    "broken YAML": ("{titan-v: 4}", "{titan-v: 4"),
    "a tab": ("  - {name: n0", "\t- {name: n0"),
    "a key twice": ("{titan-v: 4}", "{titan-v: 4, titan-v: 2}"),
    "a date that is none": ("name: good", "name: 2020-13-45"),
    "an empty file": ("", ""),
    "a list as a file": ("", "[1, 2]"),
    "an unknown key": ("network:", "netwerk:"),
    "an unknown key like no other": ("emulate:", "qqq:"),
    "an unknown key of a node": ("devices: {titan-v", "devcies: {titan-v"),
    "an unknown key of a kind": ("fp32_tflops: 5.3", "fp32: 5.3"),
    "an unknown key of a link": ("latency_us: 6", "latency_ms: 6"),
    "an unknown key of emulate": ("time_scale: 1.0", "scale: 1.0"),
    "a missing key": ("name: n0, ", ""),
    "no link": (", link: pcie3-x16", ""),
    "a link without bandwidth": ("bandwidth_gb_s: 12.0, ", ""),
    "an unknown kind": ("titan-v: 4", "titan-x: 4"),
    "an unknown kind in a list": ("{titan-v: 4}", "[titan-v, {2080ti: 1}]"),
    "a kind like no other": ("titan-v: 4", "zzz: 4"),
    "an unknown link": ("pcie3-x16", "pcie3"),
    "an unknown network": ("infiniband-fdr", "infiniband"),
    "a negative figure": ("fp32_tflops: 5.3", "fp32_tflops: -5.3"),
    "a zero figure": ("memory_gb: 8", "memory_gb: 0"),
    "an infinite figure": ("fp32_tflops: 5.3", "fp32_tflops: .inf"),
    "not a number": ("bandwidth_gb_s: 12.0", "bandwidth_gb_s: .nan"),
    "a negative latency": ("latency_us: 6", "latency_us: -6"),
    "an efficiency above one": ("memory_gb: 8", "memory_gb: 8, compute_efficiency: 1.5"),
    "a figure with its unit": ("memory_gb: 8", "memory_gb: 8 GB"),
    "a boolean figure": ("time_scale: 1.0", "time_scale: true"),
    "no time scale": ("time_scale: 1.0", "time_scale: 0"),
    "emulate: true": ("{time_scale: 1.0}", "true"),
    "no such count": ("titan-v: 4", "titan-v: 0"),
    "too many devices": ("titan-v: 4", "titan-v: 40000"),
    "half a device": ("titan-v: 4", "titan-v: 1.5"),
    "a count as text": ("titan-v: 4", "titan-v: four"),
    "no nodes": ("", "nodes: []"),
    "nodes as a mapping": ("", "nodes: {n0: {}}"),
    "no devices": ("{titan-v: 4}", "{}"),
    "devices as text": ("{titan-v: 4}", "titan-v"),
    "a number in a device list": ("{titan-v: 4}", "[4]"),
    "a number as a kind": ("{titan-v: 4}", "{4090: 1}"),
    "a name that YAML takes for a number": ("name: n0", "name: 1"),
    "a name that YAML takes for a boolean": ("name: n0", "name: on"),
    "an empty name": ("name: n0", "name: ''"),
    "an empty kind": ("titan-v: 4", "'': 4"),
    "a number that no float holds": ("memory_gb: 8", "memory_gb: 1" + "0" * 400),
    "a name with a colon": ("name: n0", "name: 'n0:1'"),
    "a name twice": ("name: n1", "name: n0"),
    "a link as a number": ("link: pcie3-x16", "link: 16"),
    "no network": ("network: infiniband-fdr\n", ""),
    "an incomplete kind": ("memory_gb: 8, fp32_tflops: 5.3", "memory_gib: 8"),
    "a size in two units": ("memory_gb: 8", "memory_gb: 8, memory_gib: 8"),
    "more reserve than memory": ("memory_gb: 8", "memory_gb: 8, reserve_gb: 9"),
    "braces in a text": ("memory_gb: 8", "memory_gb: '{8}'"),
}

GROUPS_CASES = {
    "a groups file: unknown device": "virtual_workers: [[n0:0, n1:0], [n0:1, n2:1]]",
    "a groups file: a device twice": "virtual_workers: [[n0:0, n1:0], [n0:1, n0:0]]",
    "a groups file: an empty worker": "virtual_workers: [[n0:0], []]",
    "a groups file: no workers": "virtual_workers: []",
    "a groups file: workers missing": "ordered: true",
    "a groups file: one list": "virtual_workers: [n0:0, n1:0]",
    "a groups file: a number": "virtual_workers: [[0, 1]]",
    "a groups file: unknown key": "virtual_worker: [[n0:0]]",
    "a groups file: ordered is no boolean": "{virtual_workers: [[n0:0]], ordered: maybe}",
    "a groups file: a list": "[[n0:0]]",
    "a groups file: broken": "virtual_workers: [[n0:0]",
}


def message(action: object) -> str:
    with pytest.raises(ClusterError) as caught:
        action()  # type: ignore[operator]
    assert caught.value.hint, str(caught.value)
    return str(caught.value)


def all_messages() -> str:
    """In the current folder, so that messages hold no path of this machine."""
    texts = {"a missing file": message(lambda: Cluster.load("missing.yaml"))}
    Path("folder").mkdir()
    texts["a folder"] = message(lambda: Cluster.load("folder"))
    Path("c.yaml").write_bytes(b"name: \xff\xfe\n")
    texts["not UTF-8"] = message(lambda: Cluster.load("c.yaml"))
    for title, (old, new) in CLUSTER_CASES.items():
        assert GOOD.count(old) == 1 or not old, f"{title}: {old!r} must stand once in GOOD"
        Path("c.yaml").write_text(GOOD.replace(old, new) if old else new)
        texts[title] = message(lambda: Cluster.load("c.yaml"))
    Path("c.yaml").write_text(GOOD)
    cluster = Cluster.load("c.yaml")
    texts["an unknown policy"] = message(lambda: allocate(cluster, "NPP"))
    texts["a missing groups file"] = message(lambda: allocate(cluster, "missing.yaml"))
    for title, text in GROUPS_CASES.items():
        Path("g.yaml").write_text(text)
        texts[title] = message(lambda: allocate(cluster, "g.yaml"))
    texts["an unknown placement"] = message(lambda: place_parameters([], {}, ["n0"], "robin"))
    return "".join(f"# {title}\n{text}\n\n" for title, text in texts.items())


def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = all_messages()
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD)
    assert len(Cluster.load(path).devices) == 8


def test_brackets_too_deep_are_one_error() -> None:
    with pytest.raises(ClusterError, match="too deep") as caught:
        parse_yaml("[" * 5000, "c.yaml")
    assert caught.value.code == "HP202"


@pytest.mark.parametrize("text", ["[" * 200, "{a: " * 200, "- " * 3000])
def test_whatever_is_too_deep_is_one_error(text: str) -> None:
    with pytest.raises(ClusterError, match="too deep"):
        parse_yaml(text, "c.yaml")


def test_brackets_as_deep_as_anybody_writes_are_read() -> None:
    assert parse_yaml("[" * 90 + "]" * 90, "c.yaml")


#: Ten levels of ten aliases each: eleven lines for 10^10 values and more.
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 11))
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 11)
)


@pytest.mark.parametrize("text", [BOMB, MERGE_BOMB, GOOD.replace("kinds:\n", f"{BOMB}kinds:\n")])
def test_aliases_that_multiply_are_one_error(text: str) -> None:
    with pytest.raises(ClusterError, match=r"aliases stand for \d\d,\d{3},\d{3},\d{3} values") as caught:
        parse_yaml(text, "c.yaml")
    assert caught.value.code == "HP202"
    assert caught.value.hint


def test_aliases_are_read_where_they_do_not_multiply() -> None:
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]", "c.yaml") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


def test_a_file_without_end_is_one_error() -> None:
    with pytest.raises(ClusterError, match="more than 16 MB") as caught:
        Cluster.load("/dev/zero")
    assert caught.value.code == "HP202"


def test_a_number_too_long_to_print_is_one_error() -> None:
    with pytest.raises(ClusterError, match="a number of more than 1000 digits"):
        Cluster.from_dict(parse_yaml(f"name: m\nnodes: 0x{'f' * 5000}", "c.yaml"), "c.yaml")
