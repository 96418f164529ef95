"""Links without sockets, for tests and simulation.

Decides nothing; imitates what ZeroMQ promises: frames arrive whole, in order, at most once, and a full pipe
or a vanished peer is told to the sender. Single-threaded; never used by a daemon.
"""

from collections import deque

from common import limits
from transport.link import Frames, Sent


class MemoryRouter:
    """The binding side. Peers appear when a `MemoryDealer` connects."""

    def __init__(self, capacity: int = limits.HIGH_WATER_MARK_MESSAGES) -> None:
        self.capacity = capacity
        self.arrived: deque[tuple[bytes, Frames]] = deque()
        self.peers: dict[bytes, MemoryDealer] = {}

    def send(self, route: bytes, frames: Frames) -> Sent:
        peer = self.peers.get(route)
        if peer is None:
            return Sent.GONE
        if len(peer.arrived) >= self.capacity:
            return Sent.FULL
        peer.arrived.append(list(frames))
        return Sent.YES

    def receive(
        self, limit: int, limit_bytes: int = limits.RECEIVE_BATCH_BYTES
    ) -> list[tuple[bytes, Frames]]:
        batch: list[tuple[bytes, Frames]] = []
        while self.arrived and len(batch) < limit and limit_bytes > 0:
            batch.append(self.arrived.popleft())
            limit_bytes -= sum(map(len, batch[-1][1]))
        return batch

    def lost(self) -> list[bytes]:
        return []

    def refusal(self) -> None:
        return None

    def close(self) -> None:
        for peer in self.peers.values():
            peer.router = None
        self.peers.clear()


class MemoryDealer:
    """The connecting side; `route` is its own name for the attempt, the router draws another."""

    def __init__(self, router: MemoryRouter, route: bytes) -> None:
        self.router: MemoryRouter | None = router
        self.route = route
        self.arrived: deque[Frames] = deque()
        self._name = b"peer-%d" % id(self)
        router.peers[self._name] = self

    def send(self, route: bytes, frames: Frames) -> Sent:
        if self.router is None or len(self.router.arrived) >= self.router.capacity:
            return Sent.FULL
        self.router.arrived.append((self._name, list(frames)))
        return Sent.YES

    def receive(
        self, limit: int, limit_bytes: int = limits.RECEIVE_BATCH_BYTES
    ) -> list[tuple[bytes, Frames]]:
        batch: list[tuple[bytes, Frames]] = []
        while self.arrived and len(batch) < limit and limit_bytes > 0:
            batch.append((self.route, self.arrived.popleft()))
            limit_bytes -= sum(map(len, batch[-1][1]))
        return batch

    def lost(self) -> list[bytes]:
        return [self.route] if self.router is None else []

    def refusal(self) -> None:
        return None

    def close(self) -> None:
        if self.router is not None:
            self.router.peers.pop(self._name, None)
            self.router = None
