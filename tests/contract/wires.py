"""One interface to the two kinds of links, so that the same tests hold both."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from common.clock import now_ms
from common.errors import ConfigError
from transport.link import DealerLink, Frames, Link, RouterLink, Sent
from transport.memory_link import MemoryDealer, MemoryRouter
from transport.zmq_sockets import new_context

WAIT_MS = 10_000
POLL_S = 0.002


def wait_until(condition: Callable[[], Any], bound_ms: int = WAIT_MS) -> Any:
    """The first true value of `condition`; fails when there is none in time."""
    deadline_ms = now_ms() + bound_ms
    pause = threading.Event()
    while not (value := condition()):
        assert now_ms() < deadline_ms, f"not within {bound_ms} ms"
        pause.wait(POLL_S)
    return value


def nothing_arrives(*links: Link, during_ms: int) -> bool:
    """Whether the links stay silent for so long."""
    deadline_ms = now_ms() + during_ms
    pause = threading.Event()
    while now_ms() < deadline_ms:
        if any(link.receive(1) for link in links):
            return False
        pause.wait(POLL_S)
    return True


class Wire(Protocol):
    """Opens one router and any number of dealers to it."""

    router: Any

    def dealer(self, route: bytes = b"attempt-1") -> Any:
        """Another peer of the router."""

    def close(self) -> None:
        """Let go of everything."""


class MemoryWire:
    def __init__(self) -> None:
        self.router = MemoryRouter()
        self._dealers: list[MemoryDealer] = []

    def dealer(self, route: bytes = b"attempt-1") -> MemoryDealer:
        self._dealers.append(MemoryDealer(self.router, route))
        return self._dealers[-1]

    def close(self) -> None:
        for link in (*self._dealers, self.router):
            link.close()


class ZmqWire:
    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.context = new_context()
        self.router = RouterLink(
            self.context, "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{directory}/s"
        )
        self.endpoint = self.router.endpoint
        self._dealers: list[DealerLink] = []

    def dealer(self, route: bytes = b"attempt-1") -> DealerLink:
        self._dealers.append(DealerLink(self.context, self.endpoint, route))
        return self._dealers[-1]

    def restart_router(self) -> None:
        """Close the binding side and bind another one at the same endpoint."""
        self.router.close()
        self.router = wait_until(self._bound)

    def _bound(self) -> RouterLink | None:
        try:
            return RouterLink(self.context, self.endpoint)
        except ConfigError:
            return None  # the closed socket has not let go of the port yet

    def close(self) -> None:
        for link in (*self._dealers, self.router):
            if not link.socket.closed:
                link.close()
        self.context.term()


def raw_connection(endpoint: str) -> socket.socket:
    """A plain connection to a ZeroMQ endpoint, for what no ZeroMQ peer would send."""
    if endpoint.startswith("ipc://"):
        plain = socket.socket(socket.AF_UNIX)
        plain.connect(endpoint.removeprefix("ipc://"))
        return plain
    host, port = endpoint.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)))


def silent_listener(kind: str, directory: Path) -> tuple[socket.socket, str]:
    """A peer that takes connections and never says a word, and its endpoint."""
    if kind == "ipc":
        plain = socket.socket(socket.AF_UNIX)
        plain.bind(f"{directory}/silent")
        endpoint = f"ipc://{directory}/silent"
    else:
        plain = socket.socket()
        plain.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{plain.getsockname()[1]}"
    plain.listen()
    return plain, endpoint


def send_all(sender: Link, route: bytes, batches: list[Frames], read: Callable[[], None]) -> None:
    """Send every message in order; `read` makes room whenever the link is full."""
    for frames in batches:
        deadline_ms = now_ms() + WAIT_MS
        while (sent := sender.send(route, frames)) is Sent.FULL:
            assert now_ms() < deadline_ms
            read()
        assert sent is Sent.YES


class Relay:
    """Carries bytes between one client and a node, and keeps them."""

    def __init__(self, endpoint: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._node = raw_connection(endpoint)
        self._client = None
        self.carried = b""
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def turn(self) -> None:
        if self._client is None:
            self._client, _ = self._listener.accept()
            self._client.setblocking(False)
            self._node.setblocking(False)
        for source, target in ((self._client, self._node), (self._node, self._client)):
            try:
                part = source.recv(65_536)
            except BlockingIOError:
                continue
            self.carried += part
            target.setblocking(True)
            target.sendall(part)
            target.setblocking(False)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        for plain in (self._listener, self._node, self._client):
            if plain is not None:
                plain.close()
