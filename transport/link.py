"""Links: frames to and from peers, over ZeroMQ.

Decides how frames move and what a refused send means; called by the control port from the loop thread alone.
It knows nothing of messages or sessions, never blocks, and keeps nothing: a frame it could not send is the
caller's. `transport.memory_link` offers the same interface without sockets; tests/contract holds both to it.
"""

import threading
from enum import Enum
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from common import limits
from common.errors import check
from transport.curve import Gate, OnDenied, Refusal, refusal_of
from transport.key_files import ClientKeys, ServerKeys
from transport.zmq_sockets import bind_gate, bind_router, connect_dealer, watch_failures

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

    def receive(
        self, limit: int, limit_bytes: int = limits.RECEIVE_BATCH_BYTES
    ) -> list[tuple[bytes, Frames]]:
        """At most `limit` whole messages that have arrived, with the route each came by.

        limit_bytes: the message that reaches it is the last one.
        """

    def lost(self) -> list[bytes]:
        """Routes whose peer is known to be gone; what arrived before can still be received."""

    def refusal(self) -> Refusal | None:
        """Why the peer of a lost route would not have this side, if it said so; asked once."""

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

    def _receive(self, limit: int, limit_bytes: int) -> list[Frames]:
        self._check_thread()
        arrived: list[Frames] = []
        while len(arrived) < limit and limit_bytes > 0:
            try:
                frames = [self.socket.recv(zmq.NOBLOCK)]
            except zmq.Again:
                break
            # A message arrives whole, so none of this waits. ZeroMQ has no limit to its number of frames.
            while self.socket.getsockopt(zmq.RCVMORE):
                frame = self.socket.recv(zmq.NOBLOCK)
                if len(frames) <= limits.MESSAGE_FRAMES:
                    frames.append(frame)
            arrived.append(frames)
            limit_bytes -= sum(map(len, frames))
        return arrived


class RouterLink(_ZmqLink):
    """The binding side: many peers behind one ROUTER; `endpoint` is the resolved address."""

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        keys: ServerKeys | None = None,
        on_denied: OnDenied = lambda denial: None,
    ) -> None:
        """Bind. Raises `ConfigError` when the endpoint is in use, or cannot or must not be bound.

        keys: none lets everybody in who reaches the endpoint. A context has room for one link with keys.
        """
        self._gate = None if keys is None else Gate(bind_gate(context), keys.allowed, on_denied)
        self._failures: zmq.Socket | None = None
        try:
            socket, self._lock = bind_router(context, endpoint, keys)
        except BaseException:
            if self._gate is not None:
                self._gate.requests.close()
            raise
        super().__init__(socket)
        if self._gate is not None:
            self.sockets.append(self._gate.requests)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def clients_denied(self) -> int:
        """Handshakes that came to nothing for want of a listed key."""
        return 0 if self._gate is None else self._gate.denied

    def send(self, route: bytes, frames: Frames) -> Sent:
        return self._send([route, *frames])

    def receive(
        self, limit: int, limit_bytes: int = limits.RECEIVE_BATCH_BYTES
    ) -> list[tuple[bytes, Frames]]:
        if self._gate is not None:
            self.attend()
            self._gate.serve()
            self._gate.count_failures(self._failures)
        return [(frames[0], frames[1:]) for frames in self._receive(limit, limit_bytes)]

    def attend(self) -> None:
        """From now on `sockets` has everything that can end a poll; call it just before they are watched.

        Not at the bind: nothing is received while a model loads, and failed handshakes would pile up unread
        until ZeroMQ's thread stands still.
        """
        self._check_thread()
        if self._gate is not None and self._failures is None:
            self._failures = watch_failures(self.socket)
            self.sockets.append(self._failures)

    def lost(self) -> list[bytes]:
        return []  # a ROUTER does not tell; a send or the lease does

    def refusal(self) -> Refusal | None:
        return None

    def close(self) -> None:
        if self._failures is not None:
            # To the last one: disabling would wait for ever for ZeroMQ's thread if that waits for room here.
            while self._failures.poll(0):
                self._gate.count_failures(self._failures)
            self.socket.disable_monitor()
            self._failures.close(linger=0)
            self._failures = None
        if self._gate is not None:
            self._gate.requests.close()
        self.socket.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class DealerLink(_ZmqLink):
    """The connecting side of one attempt and the session that may come of it."""

    def __init__(
        self, context: zmq.Context, endpoint: str, route: bytes, keys: ClientKeys | None = None
    ) -> None:
        """keys: those that a node with keys asks for."""
        self._has_keys = keys is not None
        socket, self._monitor = connect_dealer(context, endpoint, keys)
        super().__init__(socket)
        self.route = route
        self.sockets.append(self._monitor)

    def send(self, route: bytes, frames: Frames) -> Sent:
        return self._send(frames)

    def receive(
        self, limit: int, limit_bytes: int = limits.RECEIVE_BATCH_BYTES
    ) -> list[tuple[bytes, Frames]]:
        return [(self.route, frames) for frames in self._receive(limit, limit_bytes)]

    def lost(self) -> list[bytes]:
        self._check_thread()
        return [self.route] if self._monitor.poll(0) else []

    def refusal(self) -> Refusal | None:
        # The first event says why; others, such as that of the closed connection, only follow from it.
        if not self._monitor.poll(0):
            return None
        event = recv_monitor_message(self._monitor)
        return refusal_of(event["event"], event["value"], self._has_keys)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()
