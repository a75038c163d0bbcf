"""The mailbox over real Gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mailbox_scenarios import every_type

from hetpipe_compiler.runtime.channels import MessageKind
from hetpipe_compiler.runtime.transport.process_group import ProcessGroupMailbox


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Name.rank -> what the scenario returned there, or the error it raised as a dict."""
    folder = tmp_path_factory.mktemp("mailbox")
    script = Path(__file__).with_name("mailbox_scenarios.py")
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(folder)], env=environment) for rank in range(2)
    ]
    for process in processes:
        assert process.wait(60) == 0
    return {path.stem: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}


def test_every_type_arrives_as_it_was(results: dict[str, Any]) -> None:
    got, want = results["types.1"], every_type()
    assert list(got) == list(want)
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), name
        else:
            assert type(got[name]) is type(value), name
            assert got[name] == value, name


def test_changed_shapes_dtypes_and_scalars_are_announced(results: dict[str, Any]) -> None:
    assert results["changing.1"] == 6


def test_both_sides_may_send_first(results: dict[str, Any]) -> None:
    assert results["both_send_first.0"] == [11.0, 12.0, 13.0]
    assert results["both_send_first.1"] == [1.0, 2.0, 3.0]


def test_a_sender_is_held_back(results: dict[str, Any]) -> None:
    """Before the receiver takes a1 it has a1 a2 a3 sent, and waits; and so on."""
    assert results["held_back.1"] == [3, 4, 5, 5, 5]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("wrong_minibatch", ["expected a1<0 from stage 0", "a2<0 came"]),
        ("wrong_names", ["[x, y]", "[x, z]"]),
        ("garbage", ["expected a1<0", "no header of ours"]),
        ("unannounced", ["expected a3<0 with 16 bytes", "20 bytes came"]),
    ],
)
def test_another_message_than_expected_is_refused(results: dict[str, Any], scenario: str, words: list[str]) -> None:
    error = results[f"{scenario}.1"]
    assert error["code"] == "HP530"
    for word in words:
        assert word in error["text"]


def test_an_emulated_message_takes_its_time(results: dict[str, Any]) -> None:
    seconds, waited_s = results["emulated.1"]
    assert 0.28 < seconds < 5
    assert waited_s == pytest.approx(seconds, abs=0.1)


def test_a_lost_peer_is_named(results: dict[str, Any]) -> None:
    error = results["lost.1"]
    assert error["type"] == "PeerLostError"
    assert "stage 0 at g4<0" in error["text"]


def test_what_no_message_can_hold_is_a_bug() -> None:
    with pytest.raises(TypeError, match="'x' is str"):
        ProcessGroupMailbox(vw=0, stage=0).send(MessageKind.ACTIVATIONS, 1, 1, {"x": "text"})
