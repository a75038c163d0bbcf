"""The channels of a run in one process and virtual time: messages and parameter servers in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hetpipe_compiler.ir.schedule import Instruction, Op
from hetpipe_compiler.runtime.channels import MessageKind, PulledWeights
from hetpipe_compiler.runtime.merge import BufferBook
from hetpipe_compiler.runtime.stage import gradient_names
from hetpipe_compiler.runtime.wsp.server import ParameterShard, Reply

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.ir.cluster import Cluster
    from hetpipe_compiler.ir.plan import Plan, VirtualWorker


@dataclass
class VirtualClock:
    """The time of the instruction under way, in milliseconds since the start."""

    now_ms: float = 0.0


class Post:
    """The messages under way in one virtual worker, and how long each takes."""

    def __init__(self, worker: VirtualWorker, cluster: Cluster) -> None:
        self._worker, self._cluster = worker, cluster
        self._mail: dict[tuple[MessageKind, int, int, int], tuple[float, dict[str, Any]]] = {}

    def put(self, kind: MessageKind, minibatch: int, source: int, target: int, sent_ms: float, values: Any) -> None:
        """Send; it arrives after its predicted time."""
        key = (kind, minibatch, source, target)
        assert key not in self._mail, f"message {key} sent twice"
        self._mail[key] = (sent_ms + self._transfer_ms(kind, source, target), values)

    def arrival_ms(self, kind: MessageKind, minibatch: int, source: int, target: int) -> float | None:
        """When it arrives; None: not sent yet."""
        mail = self._mail.get((kind, minibatch, source, target))
        return mail[0] if mail else None

    def take(self, kind: MessageKind, minibatch: int, source: int, target: int) -> dict[str, Any]:
        """Its values; each message is taken once."""
        return self._mail.pop((kind, minibatch, source, target))[1]

    def _transfer_ms(self, kind: MessageKind, source: int, target: int) -> float:
        stages = self._worker.stages
        if kind is MessageKind.ACTIVATIONS:
            n_bytes = sum(p.bytes for p in stages[target].inputs if p.source == source)
        else:
            names = set(gradient_names(stages[source].inputs, target))
            n_bytes = sum(p.bytes for p in stages[source].inputs if p.name in names)
        ends = (self._cluster.device(stages[source].device), self._cluster.device(stages[target].device))
        return self._cluster.link_between(*ends).ms(n_bytes)


class MemoryMailbox:
    """`channels.Mailbox` of one stage; tensors are copied on the way, keeping their strides."""

    def __init__(self, post: Post, stage: int, clock: VirtualClock) -> None:
        self._post, self._stage, self._clock = post, stage, clock

    def send(self, kind: MessageKind, minibatch: int, peer: int, values: Mapping[str, Any]) -> None:
        copies = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        self._post.put(kind, minibatch, self._stage, peer, self._clock.now_ms, copies)

    def receive(self, kind: MessageKind, minibatch: int, peer: int, names: tuple[str, ...]) -> dict[str, Any]:
        values = self._post.take(kind, minibatch, peer, self._stage)
        assert tuple(values) == names, f"expected {names} from stage {peer}, got {tuple(values)}"
        return values

    def arrival_ms(self, receive: Instruction) -> float | None:
        """When the message of a receive instruction arrives; None: not sent yet."""
        assert receive.peer is not None
        kind = MessageKind.ACTIVATIONS if receive.op is Op.RECEIVE_ACTIVATIONS else MessageKind.GRADIENTS
        return self._post.arrival_ms(kind, receive.index, receive.peer, self._stage)


@dataclass
class _Route:
    """A stage's way to one server.

    Attributes:
        transfer_ms: Of its parameters, one way.
        arrived: Replies under way or not handed out, with their arrival times.
        clock: Highest clock handed out.
    """

    shard: ParameterShard
    names: tuple[str, ...]
    transfer_ms: float
    arrived: list[tuple[float, Reply]] = field(default_factory=list)
    clock: int = 0


class Servers:
    """The parameter servers of a plan, and the buffers that the stages report.

    A push takes effect when it is sent; a reply that it sets free arrives after the time of both ways.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, Tensor],
        reproducible: bool,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._plan, self._weights = plan, weights
        trainable = {p.name for p in plan.parameters if p.trainable}
        self._shards = {
            server.node: ParameterShard(
                {name: weights[name] for name in server.parameters if name in trainable},
                len(plan.virtual_workers),
                scale=plan.update_scale,
                staleness=plan.staleness,
                reproducible=reproducible,
                on_event=on_event,
            )
            for server in plan.servers
        }
        self.book = BufferBook({b.name: weights[b.name] for b in plan.buffers})
        self._routes: dict[tuple[str, int, int], _Route] = {}

    def link(self, vw: int, stage: int, cluster: Cluster, clock: VirtualClock) -> MemoryLink:
        """The way of one stage to the servers that hold its parameters."""
        here = self._plan.virtual_workers[vw].stages[stage]
        sizes = {p.name: p.bytes for p in self._plan.parameters}
        node = cluster.device(here.device).node
        routes = []
        for server, shard in self._shards.items():
            names = tuple(n for n in here.parameters if n in shard.names)
            if names:
                way = cluster.node(node).link if server == node else cluster.network
                route = _Route(shard, names, way.ms(sum(sizes[n] for n in names)))
                self._routes[server, vw, stage] = route
                routes.append((server, route))
        return MemoryLink(self, vw, stage, clock, routes)

    def deliver(self, server: str, replies: list[Reply], now_ms: float) -> None:
        """Send replies on their way."""
        for reply in replies:
            route = self._routes[server, reply.vw, reply.stage]
            route.arrived.append((now_ms + 2 * route.transfer_ms, reply))

    def result(self) -> dict[str, Tensor]:
        """All parameters and buffers of the plan by name."""
        values = {p.name: self._weights[p.name] for p in self._plan.parameters}
        for shard in self._shards.values():
            values.update(shard.snapshot())
        return {**values, **self.book.merged()}


class MemoryLink:
    """`channels.ParameterLink` of one stage."""

    def __init__(
        self, servers: Servers, vw: int, stage: int, clock: VirtualClock, routes: list[tuple[str, _Route]]
    ) -> None:
        self._servers, self._vw, self._stage, self._clock, self._routes = servers, vw, stage, clock, routes

    def push(self, wave: int, updates: Mapping[str, Tensor], need: int) -> None:
        for server, route in self._routes:
            mine = {name: updates[name].clone() for name in route.names}
            replies = route.shard.push(self._vw, self._stage, wave, mine)
            replies += route.shard.pull(self._vw, self._stage, route.names, need)
            self._servers.deliver(server, replies, self._clock.now_ms)

    def poll(self) -> list[PulledWeights]:
        replies = []
        for _, route in self._routes:
            here = [reply for at, reply in route.arrived if at <= self._clock.now_ms]
            route.arrived = [(at, reply) for at, reply in route.arrived if at > self._clock.now_ms]
            route.clock = max([route.clock, *(reply.clock for reply in here)])
            replies += [PulledWeights(r.weights, r.clock, r.contains) for r in here]
        return replies

    def wait(self, clock: int) -> list[PulledWeights]:
        ready = self.arrival_ms(clock)
        assert ready is not None, "wait before its time"
        assert ready <= self._clock.now_ms, "wait before its time"
        return self.poll()

    def arrival_ms(self, clock: int) -> float | None:
        """When weights at ``clock`` or later are here from every server; None: not yet known."""
        latest = 0.0
        for _, route in self._routes:
            if route.clock >= clock:
                continue
            times = [at for at, reply in route.arrived if reply.clock >= clock]
            if not times:
                return None
            latest = max(latest, min(times))
        return latest

    def buffers(self, values: Mapping[str, Tensor], samples: int) -> None:
        self._servers.book.report(self._vw, values, samples)

    def finish(self) -> None:
        for server, route in self._routes:
            replies = route.shard.finish(self._vw, self._stage, route.names)
            self._servers.deliver(server, replies, self._clock.now_ms)
