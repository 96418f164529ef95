"""Links: frames to and from peers, over ZeroMQ.

Decides how frames move and what a refused send means; called by the control port from the loop thread alone.
It knows nothing of messages or sessions, never blocks, and keeps nothing: a frame it could not send is the
caller's. `transport.memory_link` offers the same interface without sockets; tests/contract holds both to it.
"""

import threading
from enum import Enum
from typing import Protocol

import zmq

from common.errors import check
from transport.zmq_sockets import bind_router, connect_dealer

Frames = list[bytes]


class Sent(Enum):
    """Outcome of a send. FULL: try again later. GONE: this route will never take anything again."""

    YES = "yes"
    FULL = "full"
    GONE = "gone"


class Link(Protocol):
    """One socket's worth of peers, named by route."""

    def send(self, route: bytes, frames: Frames) -> Sent:
        """Hand frames over without blocking."""

    def receive(self, limit: int) -> list[tuple[bytes, Frames]]:
        """At most `limit` whole messages that have arrived, with the route each came by."""

    def lost(self) -> list[bytes]:
        """Routes whose peer is known to be gone; what arrived before can still be received."""

    def close(self) -> None:
        """Let go of the socket."""


class _ZmqLink:
    def __init__(self, socket: zmq.Socket) -> None:
        self.socket = socket
        # What a poller must watch; the first is the socket itself.
        self.sockets = [socket]
        self._thread = threading.get_ident()

    def _check_thread(self) -> None:
        check(threading.get_ident() == self._thread, "a socket was used by a thread that does not own it")

    def _send(self, frames: Frames) -> Sent:
        self._check_thread()
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.GONE
            raise
        return Sent.YES

    def _receive(self, limit: int) -> list[Frames]:
        self._check_thread()
        arrived: list[Frames] = []
        while len(arrived) < limit:
            try:
                arrived.append(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        return arrived


class RouterLink(_ZmqLink):
    """The binding side: many peers behind one ROUTER; `endpoint` is the resolved address."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        """Bind. Raises `ConfigError` when the endpoint is in use or cannot be bound."""
        socket, self._lock = bind_router(context, endpoint)
        super().__init__(socket)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, route: bytes, frames: Frames) -> Sent:
        return self._send([route, *frames])

    def receive(self, limit: int) -> list[tuple[bytes, Frames]]:
        return [(frames[0], frames[1:]) for frames in self._receive(limit)]

    def lost(self) -> list[bytes]:
        return []  # a ROUTER does not tell; a send or the lease does

    def close(self) -> None:
        self.socket.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class DealerLink(_ZmqLink):
    """The connecting side of one attempt and the session that may come of it."""

    def __init__(self, context: zmq.Context, endpoint: str, route: bytes) -> None:
        socket, self._monitor = connect_dealer(context, endpoint)
        super().__init__(socket)
        self.route = route
        self.sockets.append(self._monitor)

    def send(self, route: bytes, frames: Frames) -> Sent:
        return self._send(frames)

    def receive(self, limit: int) -> list[tuple[bytes, Frames]]:
        return [(self.route, frames) for frames in self._receive(limit)]

    def lost(self) -> list[bytes]:
        self._check_thread()
        return [self.route] if self._monitor.poll(0) else []

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()
