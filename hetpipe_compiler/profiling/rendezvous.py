"""How the two ends of ``hetpipe-profile --links`` find each other: one port, and everything that can be said at once.

torch's TCPStore alone tries again and again without a word for a minute and a half, prints its inner frames, and waits
for ever for a port where another program listens. So the ends first greet each other over plain sockets. Then rank 0
lends the socket that it listens on to the store.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hetpipe_compiler.errors import ClusterError

_HELLO, _WELCOME, _COMING = b"hetpipe-links rank 1\n", b"hetpipe-links rank 0\n", b"rank 1 comes\n"
#: Seconds to greet back, once connected.
_ANSWER_S = 5.0


def address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[::1]:PORT``. Raises `ClusterError` HP237."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()):
        raise _refused(text, "is not HOST:PORT", "for example 10.0.0.1:29500")
    if len(port) > 5 or not 0 < int(port) < 65536:
        raise _refused(text, "has no port that there is", "give one between 1 and 65535")
    return host, int(port)


def meet(rank: int, where: str, wait_s: float, on_wait: Callable[[str], object]) -> TCPStore:
    """A store that both ends share.

    Args:
        where: ``HOST:PORT``, an address of rank 0's node.
        wait_s: How long either end waits for the other.
        on_wait: Told once, whom this end waits for.

    Raises:
        ClusterError: HP237 no such host, the port is in use, or the other end did not come.
    """
    host, port = address(where)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refused(where, f"no such host: {reason}", "give an address of rank 0's node") from None
    timeout = timedelta(seconds=wait_s)
    on_wait(f"waiting up to {wait_s:g} s for rank {1 - rank} at {where}")
    if rank == 0:
        listener = _listen(where, port)
        _await_greeting(listener, where, time.monotonic() + wait_s)
        descriptor = listener.detach()  # which the store closes
        return TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
        )
    _greet(host, port, where, time.monotonic() + wait_s)
    return TCPStore(host, port, is_master=False, timeout=timeout)


def _listen(where: str, port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise _refused(
            where, f"cannot listen on port {port}: {reason}", "choose another port, for both ranks"
        ) from None


def _await_greeting(listener: socket.socket, where: str, until: float) -> None:
    """Take connections until one says what rank 1 does."""
    while (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError):  # a stranger that left, or nobody in time
            peer, _ = listener.accept()
            with peer:
                # The last word tells that rank 1 has not given this connection up while strangers were heard.
                if _exchanged(peer, _HELLO, None) and _exchanged(peer, _COMING, _WELCOME):
                    return
    listener.close()
    raise _nobody(where, 1, "did not come")


def _greet(host: str, port: int, where: str, until: float) -> None:
    """Connect until rank 0 answers."""
    reason = "did not answer"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as peer:
                if _exchanged(peer, _WELCOME, _HELLO):
                    peer.sendall(_COMING)
                    return
                reason = "is not what listens there"
        except (ConnectionResetError, BrokenPipeError):
            reason = "is not what listens there"
        except OSError as error:
            reason = f"did not answer: {(error.strerror or str(error)).lower()}"
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))
    raise _nobody(where, 0, reason)


def _exchanged(peer: socket.socket, expected: bytes, greeting: bytes | None) -> bool:
    """Whether the peer says what is expected, after our greeting if we speak first."""
    peer.settimeout(_ANSWER_S)
    if greeting is not None:
        peer.sendall(greeting)
    said = b""
    while len(said) < len(expected) and expected.startswith(said):
        part = peer.recv(len(expected) - len(said))
        if not part:
            return False
        said += part
    return said == expected


def _nobody(where: str, rank: int, what: str) -> ClusterError:
    hint = "start rank 0 and rank 1 within a minute, with the same --coordinator, an address of rank 0's node"
    return _refused(where, f"rank {rank} {what}", hint)


def _refused(where: str, message: str, hint: str) -> ClusterError:
    return ClusterError("HP237", message, where=f"--coordinator {where}", hint=hint)
