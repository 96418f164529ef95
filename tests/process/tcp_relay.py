"""A relay of plain TCP connections that stands between two daemons and stops when a test says so.

Decides nothing about what it carries: bytes, in order, from one address to another. `stop` has it read no
more on one of its ports, so that both ends see a wire that is neither closed nor moving. It runs on a thread
of its own and must never block on a peer.
"""

import random
import selectors
import socket
import threading
from dataclasses import dataclass, field

TURN_S = 0.01
RECEIVE_BYTES = 65_536


def free_ports(count: int, *hosts: str) -> list[int]:
    """So many ports in a row that nobody listens at on any of the hosts.

    They lie below those that the system gives to whoever asks for any, so that they stay free.
    """
    while True:
        first = random.randrange(10_000, 32_000)
        taken: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                taken += [socket.create_server((host, port)) for host in hosts]
        except OSError:
            continue
        finally:
            for plain in taken:
                plain.close()
        return list(range(first, first + count))


@dataclass(eq=False, slots=True)
class _Way:
    """One direction of a connection, and what waits to be sent on."""

    port: int
    source: socket.socket
    target: socket.socket
    waiting: bytearray = field(default_factory=bytearray)


class TcpRelay(threading.Thread):
    """Listens at some ports of `near`, and hands on to the same ports of `far`. carried: bytes, by port."""

    def __init__(self, near: str, far: str, ports: list[int]) -> None:
        super().__init__(name="tcp relay", daemon=True)
        self.carried = dict.fromkeys(ports, 0)
        self._far = far
        self._stopped: set[int] = set()
        self._leave = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listeners = {socket.create_server((near, port)): port for port in ports}
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._ways: dict[socket.socket, _Way] = {}
        self.start()

    def stop(self, port: int) -> None:
        """Carry nothing more on this port."""
        self._stopped.add(port)

    def go_on(self, port: int) -> None:
        """Carry again."""
        self._stopped.discard(port)

    def leave(self) -> None:
        """End the thread and every connection."""
        self._leave.set()
        self.join()

    def run(self) -> None:
        """The thread's work."""
        while not self._leave.is_set():
            ready = [key.fileobj for key, _ in self._selector.select(TURN_S)]
            for end in ready:
                if end in self._listeners:
                    self._accept(end)
                elif end in self._ways and self._ways[end].port not in self._stopped:
                    self._carry(self._ways[end])
            for way in list(self._ways.values()):
                self._send(way)
            if any(end in self._ways and self._ways[end].port in self._stopped for end in ready):
                self._leave.wait(TURN_S)  # what is not read would end every wait at once
        for end in [*self._ways, *self._listeners]:
            self._selector.unregister(end)
            end.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        port = self._listeners[listener]
        far = socket.socket()
        try:
            # What the kernel keeps of a relay that has stopped should be little.
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            far.connect((self._far, port))
        except OSError:
            near.close()
            far.close()
            return
        for source, target in ((near, far), (far, near)):
            source.setblocking(False)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ways[source] = _Way(port, source, target)
            self._selector.register(source, selectors.EVENT_READ)

    def _carry(self, way: _Way) -> None:
        if way.waiting:
            return
        try:
            data = way.source.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(way)
            return
        self.carried[way.port] += len(data)
        way.waiting += data

    def _send(self, way: _Way) -> None:
        if way.source not in self._ways or way.port in self._stopped:
            return
        try:
            while way.waiting:
                del way.waiting[: way.target.send(way.waiting)]
        except BlockingIOError:
            return
        except OSError:
            self._close(way)

    def _close(self, way: _Way) -> None:
        for end in (way.source, way.target):
            if self._ways.pop(end, None) is not None:
                self._selector.unregister(end)
                end.close()
