"""The two ends of ``hetpipe-profile --links``: they find each other, or one error says at once why not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.profiling.rendezvous import address, meet


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def somebody_else(greeting: bytes) -> Iterator[int]:
    """Another program that listens on a port and greets everybody with this, as ssh does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    peer.sendall(greeting)
                    peer.close()

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


def refused(rank: int, where: str, wait_s: float = 0.3) -> ClusterError:
    with pytest.raises(ClusterError) as caught:
        meet(rank, where, wait_s, lambda _: None)
    assert caught.value.code == "HP237"
    assert where in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_an_address_is_taken_apart() -> None:
    assert address("node0:29500") == ("node0", 29500)
    assert address("[::1]:1") == ("::1", 1)


@pytest.mark.parametrize("text", ["", "node0", ":1", "a:", "a:b", "a:-1", "a:0", "a:65536", f"a:{10**30}", "a:٣"])
def test_what_is_no_address_is_one_error(text: str) -> None:
    with pytest.raises(ClusterError) as caught:
        address(text)
    assert caught.value.code == "HP237"


def test_both_ends_share_a_store() -> None:
    where, told = f"127.0.0.1:{free_port()}", []
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(meet, rank, where, 30.0, told.append) for rank in (1, 0)]
        stores = [end.result() for end in ends]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert sorted(told) == [f"waiting up to 30 s for rank {rank} at {where}" for rank in (0, 1)]


def test_a_stranger_does_not_end_the_waiting() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        rank0 = pool.submit(meet, 0, f"127.0.0.1:{port}", 30.0, lambda _: None)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                break
            time.sleep(0.01)
        pool.submit(meet, 1, f"127.0.0.1:{port}", 30.0, lambda _: None).result()
        rank0.result()


def test_nobody_comes() -> None:
    assert "rank 1 did not come" in refused(0, f"127.0.0.1:{free_port()}").message
    assert "rank 0 did not answer: connection refused" in refused(1, f"127.0.0.1:{free_port()}").message


def test_the_port_is_in_use() -> None:
    with socket.create_server(("", 0)) as taken:
        error = refused(0, f"127.0.0.1:{taken.getsockname()[1]}", 60.0)
    assert "in use" in error.message


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b""])
def test_somebody_else_listens(greeting: bytes) -> None:
    with somebody_else(greeting) as port:
        assert "is not what listens there" in refused(1, f"127.0.0.1:{port}").message


def test_a_host_that_is_none_is_told_before_any_waiting() -> None:
    assert "no such host" in refused(0, "no host:29500", 60.0).message
    assert "no such host" in refused(1, f"{'a' * 70}.invalid:29500", 60.0).message
