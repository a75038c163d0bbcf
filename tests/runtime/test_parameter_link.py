"""Parameter links and a server loop over real ZeroMQ sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import torch
import zmq

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.collect import request
from hetpipe_compiler.runtime.events import EventReceiver, EventSender
from hetpipe_compiler.runtime.server_process import ServerLoop
from hetpipe_compiler.runtime.transport.frames import from_frame, pack, unpack
from hetpipe_compiler.runtime.transport.parameter_link import ZmqParameterLink, decode, encode
from hetpipe_compiler.runtime.waits import Activity
from hetpipe_compiler.runtime.wsp.server import ParameterShard


class Servers:
    """Two servers in threads: ``w`` and ``b`` on n0, ``v`` on n1; two virtual workers of one stage."""

    placement = {"w": "n0", "b": "n0", "v": "n1"}

    def __init__(self, **options: Any) -> None:
        initial = {"n0": {"w": torch.zeros(3), "b": torch.zeros(2)}, "n1": {"v": torch.zeros(4, 2)}}
        rule = {"staleness": options.get("staleness", 0), "reproducible": options.get("exact", False)}
        more = {"events": options.get("events"), "save_every": options.get("save_every")}
        self.loops = {
            node: ServerLoop(ParameterShard(weights, 2, scale=0.5, **rule), 2, **more)
            for node, weights in initial.items()
        }
        self.endpoints = {node: loop.endpoint for node, loop in self.loops.items()}
        self.threads = [threading.Thread(target=loop.run, daemon=True) for loop in self.loops.values()]
        self.links: list[ZmqParameterLink] = []
        for thread in self.threads:
            thread.start()

    def link(self, vw: int, **options: Any) -> ZmqParameterLink:
        link = ZmqParameterLink(
            vw=vw, stage=0, servers=self.endpoints, placement=self.placement, buffer_node="n1", **options
        )
        self.links.append(link)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        for endpoint in self.endpoints.values():
            request(endpoint, "stop", timeout_s=5)
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
def servers() -> Iterator[Servers]:
    started = Servers()
    yield started
    started.close()


def update(value: float) -> dict[str, torch.Tensor]:
    """An update of all three parameters."""
    return {"w": torch.full((3,), value), "b": torch.full((2,), value), "v": torch.full((4, 2), value)}


def test_a_wait_ends_when_everybody_has_pushed(servers: Servers) -> None:
    activity = Activity()
    one, two = servers.link(0, activity=activity), servers.link(1)
    values = update(2.0)
    one.push(0, values, need=1)
    for tensor in values.values():
        tensor.fill_(99.0)  # the link has its copy
    time.sleep(0.2)
    assert one.poll() == []
    later = threading.Timer(0.3, lambda: two.push(0, update(4.0), need=0))
    later.start()
    pulled = one.wait(1)
    later.join()
    assert activity.waited_s > 0.2
    assert activity.waited_for_weights_s == activity.waited_s
    got = {name: tensor for reply in pulled for name, tensor in reply.weights.items()}
    assert {name: float(t.flatten()[0]) for name, t in got.items()} == {"w": 3.0, "b": 3.0, "v": 3.0}
    assert {tuple(t.shape) for t in got.values()} == {(3,), (2,), (4, 2)}
    assert {(reply.clock, reply.contains) for reply in pulled} == {(1, 1)}
    assert one.poll() == []


def test_a_second_push_of_a_wave_changes_nothing(servers: Servers) -> None:
    one = servers.link(0)
    one.push(0, update(2.0), need=0)
    one.push(0, update(2.0), need=0)
    one.finish()
    _, tensors = request(servers.endpoints["n0"], "snapshot")
    assert float(tensors["w:w"][0]) == 1.0


def test_a_wave_out_of_turn_is_an_error_at_the_stage(servers: Servers) -> None:
    one = servers.link(0)
    one.push(3, update(1.0), need=0)
    with pytest.raises(RunError, match="pushed wave 3") as caught:
        one.finish()
    assert caught.value.code == "HP540"


def test_strangers_do_not_bring_a_server_down(servers: Servers) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(servers.endpoints["n0"])
    for frames in ([b"GET / HTTP/1.1"], [b""], [msgpack.packb(7)], [msgpack.packb({"op": "push"})]):
        stranger.send_multipart(frames)
    stranger.send_multipart(encode({"op": "nonsense"}))
    assert stranger.poll(5000)
    header, _ = decode(stranger.recv_multipart())
    assert header == {"op": "error", "text": header["text"]}
    assert "unknown request 'nonsense'" in header["text"]
    stranger.close(linger=0)
    context.term()


def test_who_has_finished_holds_nobody_back(servers: Servers) -> None:
    one, two = servers.link(0), servers.link(1)
    one.push(0, update(1.0), need=1)
    two.finish()
    assert {reply.clock for reply in one.wait(1)} == {1}


def test_buffers_are_kept_per_virtual_worker(servers: Servers) -> None:
    one, two = servers.link(0), servers.link(1)
    one.buffers({"mean": torch.ones(2), "count": torch.tensor(3)}, samples=12)
    one.buffers({"mean": torch.ones(2) * 2, "count": torch.tensor(4)}, samples=18)
    two.buffers({"mean": torch.zeros(2)}, samples=6)
    one.finish()
    two.finish()
    header, tensors = request(servers.endpoints["n1"], "snapshot")
    assert header["samples"] == {0: {"mean": 18, "count": 18}, 1: {"mean": 6}}
    assert torch.equal(tensors["b:0:mean"], torch.ones(2) * 2)
    assert torch.equal(tensors["b:1:mean"], torch.zeros(2))
    assert int(tensors["b:0:count"]) == 4
    assert header["clocks"] == {0: 0, 1: 0}


@pytest.fixture
def receiver() -> Iterator[EventReceiver]:
    made = EventReceiver()
    yield made
    made.close()


def kept_clocks(receiver: EventReceiver, count: int) -> list[int]:
    """The clocks of so many ``kept`` events."""
    clocks: list[int] = []
    while len(clocks) < count:
        events = receiver.receive(20.0)
        assert events
        clocks += [event["clock"] for event in events if event["kind"] == "kept"]
    return clocks


def test_exact_weights_are_kept_for_saving(receiver: EventReceiver) -> None:
    """With save_every=2 the launcher gets S_2, though another wave of one virtual worker is there already."""
    sender = EventSender(receiver.endpoint, "server")
    servers = Servers(exact=True, staleness=1, events=sender, save_every=2)
    one, two = servers.link(0), servers.link(1)
    for wave in range(3):
        one.push(wave, update(2.0), need=0)
    one.finish()
    for wave in range(2):
        two.push(wave, update(4.0), need=0)
    two.finish()
    assert kept_clocks(receiver, 2) == [2, 2]
    saved = [request(endpoint, "take", clock=2) for endpoint in servers.endpoints.values()]
    assert {header["clock"] for header, _ in saved} == {2}
    assert {name: float(t.flatten()[0]) for _, tensors in saved for name, t in tensors.items()} == {
        "w:w": 6.0,
        "w:b": 6.0,
        "w:v": 6.0,
    }
    servers.close()
    sender.close()


def test_weights_that_nobody_takes_hold_up_training(receiver: EventReceiver) -> None:
    """A disk that is slower than training: two sets wait, and further pushes; a set taken lets one more wave in."""
    sender = EventSender(receiver.endpoint, "server")
    servers = Servers(staleness=9, events=sender, save_every=1)
    links = [servers.link(vw) for vw in (0, 1)]
    for wave in range(5):
        for vw, link in enumerate(links):
            link.buffers({"mean": torch.full((2,), float(wave))}, samples=wave)
            link.push(wave, update(float(vw)), need=0)
        if wave == 0:
            assert kept_clocks(receiver, 2) == [1, 1]
    assert kept_clocks(receiver, 2) == [2, 2]
    time.sleep(0.2)
    assert [request(endpoint, "snapshot")[0]["clock"] for endpoint in servers.endpoints.values()] == [2, 2]
    for clock in range(1, 6):
        for endpoint in servers.endpoints.values():
            header, tensors = request(endpoint, "take", clock=clock)
            assert header["clock"] == clock
        if clock == 1:  # as it was then
            assert header["samples"] == {0: {"mean": 0}, 1: {"mean": 0}}
            assert float(tensors["b:0:mean"][0]) == 0
        if clock < 4:
            assert kept_clocks(receiver, 2) == [clock + 2, clock + 2]
    servers.close()
    sender.close()


def test_an_emulated_network_delays_both_ways(servers: Servers) -> None:
    one = servers.link(0, transfer_ms=lambda *_: 150.0)
    start = time.monotonic()
    one.push(0, update(1.0), need=0)
    while not one.poll():
        time.sleep(0.005)
    assert time.monotonic() - start > 0.29


def test_a_stage_without_parameters_never_waits() -> None:
    link = ZmqParameterLink(vw=0, stage=0, servers={}, placement={})
    assert link.wait(5) == []
    link.finish()
    link.close()


def test_a_silent_server_is_an_error() -> None:
    with pytest.raises(RunError, match="did not answer") as caught:
        request("tcp://127.0.0.1:9", "snapshot", timeout_s=0.1)
    assert caught.value.code == "HP541"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(True),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).bfloat16().t(),
        torch.tensor(2.5, dtype=torch.float64),
        torch.complex(torch.ones(2), torch.zeros(2)),
    ],
)
def test_frames_keep_dtype_shape_and_values(tensor: torch.Tensor) -> None:
    specs, buffers = pack({"x": tensor})
    got = unpack(specs, [bytes(b) for b in buffers])["x"]
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(got, tensor)


def test_frames_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="1 tensors announced, 0 came"):
        unpack([("x", "float32", (2,))], [])
    with pytest.raises(ValueError, match="different"):
        from_frame(b"12", "float32", (2,))
    with pytest.raises(ValueError, match="no dtype"):
        from_frame(b"12345678", "nonsense", (2,))


def test_events_may_come_from_any_thread() -> None:
    receiver = EventReceiver()
    sender = EventSender(receiver.endpoint, "vw0/stage1")
    threads = [threading.Thread(target=sender.send, args=("status",), kwargs={"steps": i}) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender.close()
    events = receiver.receive(5.0)
    while len(events) < 20:
        more = receiver.receive(5.0)
        assert more
        events += more
    assert {event["steps"] for event in events} == set(range(20))
    assert {event["process"] for event in events} == {"vw0/stage1"}
    receiver.close()
