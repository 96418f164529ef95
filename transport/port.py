"""The control port: typed messages over a link, with one bounded outbox per peer.

Decides what happens to a message that the link cannot take now. Called by the wiring of nodes and clients,
on the loop thread. The outbox is a FIFO that is never overtaken, withdrawn from or waited on; when it is full
or its route is gone, the port says so once and the session layer ends that peer's session.
"""

from collections import deque
from collections.abc import Iterator

from common import limits
from common.clock import now_ms, pause_ms
from common.errors import PeerProtocolError
from common.messages import HelloRefused
from transport.codec import Header, decode, encode
from transport.link import Link, Sent
from transport.peers import BadFrame, FrameReceived, RouteLost, SendFrame


class _Outbox:
    """Frames of one peer that the link would not take, and since when it takes nothing."""

    __slots__ = ("blocked_ms", "frames")

    def __init__(self, frames: list[bytes], now_ms: int) -> None:
        self.frames = deque([frames])
        self.blocked_ms = now_ms


def read_frames(route: bytes, frames: list[bytes]) -> FrameReceived | BadFrame:
    """What a message from the wire is to the sessions."""
    try:
        header, message = decode(frames)
    except PeerProtocolError as error:
        return BadFrame(route, *error.place, error.code, error.detail)
    return FrameReceived(route, header.session, header.sequence, message)


class ControlPort:
    """One link and its outboxes. A peer that takes nothing for `give_up_ms` counts as gone."""

    def __init__(self, link: Link, give_up_ms: int) -> None:
        self.link = link
        self._give_up_ms = give_up_ms
        self._outboxes: dict[bytes, _Outbox] = {}

    def deadline_ms(self, now_ms: int) -> int | None:
        """When `flush` should be called again, if something waits."""
        return now_ms + limits.OUTBOX_RETRY_MS if self._outboxes else None

    def send(self, frame: SendFrame, now_ms: int) -> RouteLost | None:
        """Send or keep a message; `RouteLost` when this peer can no longer be reached."""
        frames = encode(Header(frame.session, frame.sequence), frame.message)
        outbox = self._outboxes.get(frame.route)
        if outbox is not None:
            if len(outbox.frames) >= limits.OUTBOX_MESSAGES:
                del self._outboxes[frame.route]
                return RouteLost(frame.route)
            outbox.frames.append(frames)
            return None
        sent = self.link.send(frame.route, frames)
        if sent is Sent.FULL:
            self._outboxes[frame.route] = _Outbox(frames, now_ms)
        return RouteLost(frame.route) if sent is Sent.GONE else None

    def flush(self, now_ms: int) -> list[RouteLost]:
        """Try what waits, in order; name the routes that have gone or take nothing any more."""
        lost = []
        for route, outbox in list(self._outboxes.items()):
            sent = Sent.YES
            while outbox.frames and sent is Sent.YES:
                sent = self.link.send(route, outbox.frames[0])
                if sent is Sent.YES:
                    outbox.frames.popleft()
                    outbox.blocked_ms = now_ms
            if sent is Sent.GONE or now_ms - outbox.blocked_ms >= self._give_up_ms:
                lost.append(RouteLost(route))
            if not outbox.frames or route in {gone.route for gone in lost}:
                del self._outboxes[route]
        return lost

    def receive(self) -> Iterator[FrameReceived | BadFrame | RouteLost]:
        """Decode what has arrived, one batch of it; then name the routes that are gone."""
        # Asked for first: what a peer sent before it went has arrived by then.
        lost = self.link.lost()
        arrived = self.link.receive(limits.RECEIVE_BATCH_MESSAGES, limits.RECEIVE_BATCH_BYTES)
        # A full batch, by number or by size, may have left something behind: one more tells.
        more = self.link.receive(1) if lost else []
        arrived += more
        drained = not more
        # Asked for before the first item goes out: what comes of it may close the link.
        refusal = self.link.refusal() if lost and drained else None
        for route, frames in arrived:
            yield read_frames(route, frames)
        if lost and drained:
            told = None if refusal is None else HelloRefused(refusal.temporary, refusal.detail, ("keys",))
            yield from (RouteLost(route, told) for route in lost)

    def finish(self) -> None:
        """Last words of a node that goes: try what waits until it is gone, or nobody takes it in time."""
        last_ms = now_ms() + limits.LAST_WORDS_MS
        while self._outboxes and now_ms() < last_ms:
            self.flush(0)  # no time for anybody's patience to be over
            pause_ms(limits.OUTBOX_RETRY_MS)

    def close(self) -> None:
        self.link.close()
