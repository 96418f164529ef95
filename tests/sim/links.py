"""Connections as ZeroMQ makes them: FIFO in each direction, one DEALER and one peer of a ROUTER.

A connection that breaks loses the ends of both rows, each as it likes. The dealer learns of it when it has
read what still arrived; the router at its next send. `DealerEnd` and `RouterEnd` are links for the
production port, `PlainPort` stands in for that port where messages travel unencoded.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from transport.link import Frames, Sent
from transport.peers import FrameReceived, RouteLost, SendFrame

CAPACITY = 1_000


class Wire:
    """One connection. `up`: from the dealer to the router. capacity: of each row; more waits outside."""

    __slots__ = (
        "broken",
        "capacity",
        "dealer",
        "dealer_open",
        "down",
        "number",
        "peer",
        "route",
        "router",
        "told",
        "up",
    )

    def __init__(self, number: int, dealer: str, router: str, route: bytes) -> None:
        self.number = number
        self.dealer = dealer
        self.router = router
        self.route = route
        self.peer = b"peer-%d" % number
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.dealer_open = True
        self.broken = False
        self.told = False
        self.capacity = CAPACITY

    def put_up(self, item: Any) -> Sent:
        if self.broken or len(self.up) >= self.capacity:
            return Sent.FULL
        self.up.append(item)
        return Sent.YES

    def put_down(self, item: Any) -> Sent:
        if self.broken or (not self.dealer_open and not self.up):
            return Sent.GONE
        if len(self.down) >= self.capacity:
            return Sent.FULL
        if self.dealer_open:
            self.down.append(item)
        return Sent.YES

    def break_off(self, up_kept: int, down_kept: int) -> None:
        """The connection is gone; of each row a first part still arrives."""
        self.broken = True
        while len(self.up) > up_kept:
            self.up.pop()
        while len(self.down) > down_kept:
            self.down.pop()

    def close_dealer(self) -> None:
        """The dealer goes; what it has sent still arrives."""
        self.dealer_open = False
        self.down.clear()

    @property
    def dead(self) -> bool:
        """Nothing can come of it any more."""
        return not self.up and (not self.dealer_open or (self.broken and self.told))


class RouterEnd:
    """The binding side's link."""

    def __init__(self) -> None:
        self.arrived: list[tuple[bytes, Any]] = []
        self.wires: dict[bytes, Wire] = {}

    def send(self, route: bytes, frames: Frames) -> Sent:
        wire = self.wires.get(route)
        return Sent.GONE if wire is None else wire.put_down(frames)

    def receive(self, limit: int, limit_bytes: int = 0) -> list[tuple[bytes, Any]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def lost(self) -> list[bytes]:
        return []

    def refusal(self) -> None:
        return None

    def close(self) -> None:
        for wire in self.wires.values():
            wire.break_off(0, len(wire.down))
        self.wires.clear()


class DealerEnd:
    """The connecting side's link."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.arrived: list[tuple[bytes, Any]] = []

    def send(self, route: bytes, frames: Frames) -> Sent:
        return self.wire.put_up(frames)

    def receive(self, limit: int, limit_bytes: int = 0) -> list[tuple[bytes, Any]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def lost(self) -> list[bytes]:
        return [self.wire.route] if self.wire.told else []

    def refusal(self) -> None:
        return None

    def close(self) -> None:
        self.wire.close_dealer()


class PlainPort:
    """The control port without codec and outbox."""

    def __init__(self, link: RouterEnd | DealerEnd) -> None:
        self.link = link

    def send(self, frame: SendFrame, now_ms: int) -> RouteLost | None:
        item = (frame.session, frame.sequence, frame.message)
        return RouteLost(frame.route) if self.link.send(frame.route, item) is Sent.GONE else None

    def flush(self, now_ms: int) -> list[RouteLost]:
        return []

    def receive(self) -> Iterator[Any]:
        for route, (session, sequence, message) in self.link.receive(1):
            yield FrameReceived(route, session, sequence, message)
        yield from map(RouteLost, self.link.lost())

    def close(self) -> None:
        self.link.close()
